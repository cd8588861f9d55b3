"""Policies with one term that does not estimate time."""

from hashlib import blake2b
from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from kvmesh.errors import InvalidRequestError
from services.router.placement.policies.base import Candidates, Policy, Terms
from services.router.workers.worker import Target


class RoundRobinPolicy(Policy):
    """The target whose newest placement is the oldest."""

    name: ClassVar[str] = "round_robin"
    cost_unit: ClassVar[str] = "turn"

    def terms(self, candidates: Candidates) -> Terms:
        return {"turn": candidates.values_of("placed_last")}


class RandomPolicy(Policy):
    """Any target, by the seeded generator."""

    name: ClassVar[str] = "random"
    cost_unit: ClassVar[str] = "chance"
    preference: float = 0.5

    def terms(self, candidates: Candidates) -> Terms:
        draw = self.context.generator.random
        return {"chance": np.array([draw() for _ in candidates.targets])}


class LeastLoadedPolicy(Policy):
    """The target with the fewest requests running, waiting or on their way."""

    name: ClassVar[str] = "least_loaded"
    cost_unit: ClassVar[str] = "requests"
    preference: float = 1.0

    def terms(self, candidates: Candidates) -> Terms:
        return {"requests": candidates.values_of("requests_active")}


class PowerOfTwoPolicy(Policy):
    """The less loaded of two random targets: nearly as even as `least_loaded`, and several routers do not pick the same one."""

    name: ClassVar[str] = "power_of_two"
    cost_unit: ClassVar[str] = "requests"
    preference: float = 1.0

    def terms(self, candidates: Candidates) -> Terms:
        targets = candidates.targets
        # Drawn from those with room: two full ones would refuse a request although another one has room.
        with_room = [i for i, target in enumerate(targets) if target.takes_requests and target.takes_prompts]
        drawn_from = with_room or list(range(len(targets)))
        requests = np.full(len(targets), np.inf)
        for i in self.context.generator.sample(drawn_from, min(2, len(drawn_from))):
            requests[i] = targets[i].requests_active
        return {"requests": requests}


class ConsistentHashPolicy(Policy):
    """Rendezvous hashing: every target draws a number from its name and the request's key, and the lowest wins.

    The key is the session, else the first block of the prompt, else the request. When a worker leaves only its requests move; when it
    is full they go to the target with the next higher number.
    """

    name: ClassVar[str] = "consistent_hash"
    cost_unit: ClassVar[str] = "draw"

    def terms(self, candidates: Candidates) -> Terms:
        key = _hash_key(candidates.ask)
        return {"draw": np.array([_rendezvous_hash(key, target) for target in candidates.targets])}


class PinnedPolicy(Policy):
    """Refuses requests that are not pinned to a decode worker, for tests. Other policies follow pins too."""

    name: ClassVar[str] = "pinned"

    def check(self, ask: Ask) -> None:
        if not ask.pinned_decode_worker_id:
            raise InvalidRequestError(
                "the router's policy is `pinned`: the request must name its decode worker",
                field="pinned_decode_worker_id",
                reason="not_pinned",
            )

    def terms(self, candidates: Candidates) -> Terms:
        """Pins leave no other candidates, except for ranks of one worker: those take turns."""
        return {"turn": candidates.values_of("placed_last")}


def _hash_key(ask: Ask) -> bytes:
    if ask.session_id:
        return ask.session_id.encode()
    return str(ask.block_hashes[0]).encode() if ask.block_hashes else ask.request_id.encode()


def _rendezvous_hash(key: bytes, target: Target) -> float:
    """Returns a number from 0 to 1."""
    name = f"{target.ref.worker_id}/{target.rank}/".encode()
    return int.from_bytes(blake2b(name + key, digest_size=8).digest()) / 2**64
