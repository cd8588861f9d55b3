"""Places requests without a router: on the least loaded workers that the registry lists. Pure.

The load is the number of requests that this frontend itself has on a worker. Prefix caches, other frontends' requests, priorities, tenants'
shares and queues are unknown here, so this is for the time without a router only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.checks import is_whole_number
from kvmesh.core import Ask, Handoff, Placement, Role, WorkerRef
from kvmesh.discovery.base import LABEL_PREFIX
from kvmesh.errors import OverloadedError, UnavailableError
from services.frontend.model_cards import Described

REASON = "least_loaded"
REQUESTS_PER_WORKER_MAX = 256
"""Requests of this frontend on one worker. Routers know the workers' limits, a frontend does not."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A decode worker, and the prefill worker that computes the prompt, if any."""

    decode: Described
    prefill: Described | None
    handoff: Handoff | None


class LocalPlacer:
    """Counts the requests of this frontend by worker. Invariant: a worker's count is the number of its placements that have not ended."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()

    def place(self, ask: Ask, workers: Sequence[Described]) -> Placement:
        """Chooses the pair with the fewest requests, and counts the request on both workers.

        Raises UnavailableError if no worker can serve the request, OverloadedError if all that can are full.
        """
        pairs = list(self._pairs(ask, workers))
        if not pairs:
            raise UnavailableError("no router answers, and no worker can serve the request", reason="no_worker")
        pair = min(pairs, key=self._load_of)
        if self._load_of(pair)[0] >= REQUESTS_PER_WORKER_MAX:
            raise OverloadedError(
                "no router answers, and all workers are at their limit of requests",
                reason="workers_full",
                retry_after_s=1.0,
            )
        placement = Placement(
            reservation_id="",
            decode=_ref(pair.decode),
            prefill=_ref(pair.prefill) if pair.prefill is not None else None,
            handoff=pair.handoff,
            rendezvous_address=pair.prefill[1].rendezvous_address if pair.prefill is not None else "",
            reasons=(REASON,),
        )
        self._in_flight.update(_worker_ids(placement))
        return placement

    def settle(self, placement: Placement) -> None:
        """Removes a placement's request from the counts."""
        # In-place subtraction also removes the workers without requests.
        self._in_flight -= Counter(_worker_ids(placement))

    def in_flight(self, worker_id: str) -> int:
        return self._in_flight[worker_id]

    def _load_of(self, pair: _Pair) -> tuple[int, int, int, str]:
        """Decode workers hold a request longest, so their load counts first. Prompts are computed apart where possible."""
        decode_id = pair.decode[0].instance_id
        prefill_load = self._in_flight[pair.prefill[0].instance_id] if pair.prefill is not None else 0
        return self._in_flight[decode_id], int(pair.prefill is None), prefill_load, decode_id

    def _pairs(self, ask: Ask, workers: Sequence[Described]) -> Iterable[_Pair]:
        usable = [each for each in workers if _serves(each, ask)]
        for decode in usable:
            if _role(decode) is not Role.DECODE or not _is_pinned(decode, ask.pinned_decode_worker_id):
                continue
            if not decode[1].requires_prefill and not ask.pinned_prefill_worker_id:
                yield _Pair(decode, None, None)
            for prefill in usable:
                if _role(prefill) is not Role.PREFILL or not _is_pinned(prefill, ask.pinned_prefill_worker_id):
                    continue
                handoff = _handoff(prefill, decode)
                if handoff is not None:
                    yield _Pair(decode, prefill, handoff)


def _serves(worker: Described, ask: Ask) -> bool:
    instance, card = worker
    return (
        instance.takes_requests
        and card.name == ask.model
        and instance.instance_id not in ask.excluded_worker_ids
        and (not ask.files_digest or card.files_digest == ask.files_digest)
        and (not ask.adapter or ask.adapter in card.adapters)
        and set(ask.required_features) <= set(card.features)
        and all(instance.meta.get(LABEL_PREFIX + name) == value for name, value in ask.required_labels.items())
    )


def _role(worker: Described) -> Role:
    return Role(worker[0].meta.get("role", Role.DECODE.value))


def _is_pinned(worker: Described, worker_id: str) -> bool:
    return worker_id in ("", worker[0].instance_id)


def _handoff(prefill: Described, decode: Described) -> Handoff | None:
    """Returns how the two can exchange KV; None if they cannot."""
    (prefill_instance, prefill_card), (decode_instance, decode_card) = prefill, decode
    key = decode_instance.meta.get("kv_compatibility_hash", "")
    if not key or prefill_instance.meta.get("kv_compatibility_hash") != key:
        return None
    common = set(prefill_card.handoffs) & set(decode_card.handoffs)
    if Handoff.SEQUENTIAL in common:
        return Handoff.SEQUENTIAL
    return Handoff.RENDEZVOUS if Handoff.RENDEZVOUS in common and prefill_card.rendezvous_address else None


def _ref(worker: Described) -> WorkerRef:
    instance = worker[0]
    epoch = instance.meta.get("epoch", "")
    return WorkerRef(
        worker_id=instance.instance_id,
        address=instance.address,
        epoch=int(epoch) if is_whole_number(epoch) else 0,
    )


def _worker_ids(placement: Placement) -> Sequence[str]:
    prefill = (placement.prefill.worker_id,) if placement.prefill is not None else ()
    return (placement.decode.worker_id, *prefill)
