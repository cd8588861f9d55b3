"""Always the same worker for the same session or prompt, as long as it is there; the others keep theirs when one leaves."""

from hashlib import blake2b
from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from services.router.placement.policies.base import Candidates, Columns, Policy
from services.router.workers.target import Target


class ConsistentHashPolicy(Policy):
    """Rendezvous hashing: every worker draws a number from its name and the ask's key, the lowest wins.

    The key is the session, else the first block of the prompt, else the request. A full worker's asks go to the next ones.
    """

    name: ClassVar[str] = "consistent_hash"
    cost_unit: ClassVar[str] = "draw"

    def weigh(self, candidates: Candidates) -> Columns:
        """One term: the number drawn, 0 to 1."""
        key = _key(candidates.ask)
        return {"draw": np.array([_draw(key, target) for target in candidates.targets])}


def _key(ask: Ask) -> bytes:
    if ask.session_id:
        return ask.session_id.encode()
    return str(ask.block_hashes[0]).encode() if ask.block_hashes else ask.request_id.encode()


def _draw(key: bytes, target: Target) -> float:
    name = f"{target.ref.worker_id}/{target.rank}/".encode()
    return int.from_bytes(blake2b(name + key, digest_size=8).digest()) / 2**64
