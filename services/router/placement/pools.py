"""Which workers could take a request of a kind: the filters that do not depend on the single request. Pure.

A pool is built once per kind and version of the fleet, so an ordinary request pays only for scoring its candidates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmesh.core import Ask, Role
from kvmesh.errors import MeshError, NotFoundError, UnavailableError, UnsupportedError
from services.router.core_settings import RETRY_AFTER_S
from services.router.health.paths import PATH_OPEN
from services.router.index.cached_tokens import CandidateTokens
from services.router.placement.bad_pairs import BadPairs, SlowFactors, failing_paths, make_bad_pairs
from services.router.placement.topology import Group, make_groups, sort_key
from services.router.workers.fleet import Fleet
from services.router.workers.target_arrays import Floats, Positions
from services.router.workers.worker import RegisteredWorker, Target

_POOLS_MAX = 256
_REDUCED_MAX = 16
"""Sets of paused paths for which a pool keeps the candidates that are left: a mesh has few frontends with a bad link at a time."""
_LABELS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """What a request needs of any worker."""

    model: str
    adapter: str
    features: frozenset[str]
    labels: frozenset[tuple[str, str]]
    files_digest: str

    @classmethod
    def of(cls, ask: Ask) -> "RequestKind":
        return cls(
            model=ask.model,
            adapter=ask.adapter,
            features=frozenset(ask.required_features),
            labels=frozenset(ask.required_labels.items()),
            files_digest=ask.files_digest,
        )


class PoolSide:
    """The candidates for one leg, sorted by `topology.sort_key`."""

    __slots__ = ("_lacking_labels", "_positions", "columns", "requires_prefill", "targets")

    def __init__(self, targets: Iterable[Target]) -> None:
        self.targets = sorted(targets, key=sort_key)
        self.columns: Positions = np.array([target.column for target in self.targets], dtype=np.intp)
        """Their columns in `TargetArrays`."""
        requires = [target.worker.requires_prefill for target in self.targets]
        self.requires_prefill: NDArray[np.bool_] | None = np.array(requires) if any(requires) else None
        """Marks candidates that cannot compute prompts. None: all can."""
        self._lacking_labels: dict[frozenset[tuple[str, str]], Floats] = {}
        self._positions: dict[Target, int] | None = None

    def lacking_labels(self, labels: Mapping[str, str]) -> Floats:
        """1 for candidates that lack one of the labels, else 0."""
        wanted = frozenset(labels.items())
        known = self._lacking_labels.get(wanted)
        if known is None:
            if len(self._lacking_labels) >= _LABELS_MAX:
                self._lacking_labels.clear()
            known = np.array([float(not wanted <= target.worker.labels.items()) for target in self.targets])
            self._lacking_labels[wanted] = known
        return known

    def lacking_adapter(self, adapter: str) -> Floats:
        """1 for candidates that have not run the adapter lately, else 0."""
        return np.array([float(adapter not in target.adapters) for target in self.targets])

    def position_of(self, target: Target | None) -> int | None:
        """Returns None if the target is no candidate."""
        if self._positions is None:
            self._positions = {target: position for position, target in enumerate(self.targets)}
        return self._positions.get(target) if target is not None else None


class Pool:
    """The candidates for requests of one kind.

    `removed` has the workers of the model that a filter removed, with the name of the filter, for explanations. `failing` has the decode
    candidates that cannot pull KV from some prefill workers, with these and the reasons. `unpaired` marks the decode candidates that
    cannot pull KV from any prefill candidate; None: there is none. A group in which KV passes between no pair is left out.
    """

    __slots__ = (
        "_bits",
        "_block_sizes",
        "_common_block_size",
        "_holders_version",
        "_reduced",
        "bad_pairs",
        "decodes",
        "failing",
        "groups",
        "key",
        "no_tokens",
        "prefills",
        "removed",
        "slow_version",
        "unpaired",
    )

    def __init__(
        self, prefills: Iterable[Target], decodes: Iterable[Target], *, removed: Sequence[tuple[RegisteredWorker, str]]
    ) -> None:
        self.prefills, self.decodes = PoolSide(prefills), PoolSide(decodes)
        self.removed = removed
        groups = make_groups(self.prefills.targets, self.decodes.targets)
        self.failing: Sequence[tuple[Target, Mapping[str, str]]] = [
            (decode, failing) for decode in self.decodes.targets if (failing := failing_paths(decode))
        ]
        self.unpaired: NDArray[np.bool_] | None = None
        self.slow_version = 0
        if self.failing:
            self._set_bad_pairs(groups, {})
            self.unpaired = _unpaired(groups, len(self.decodes.targets))
            if self.unpaired is not None:
                groups = [group for group in groups if not self.unpaired[group.decodes].all()]
        self.groups: Sequence[Group] = groups
        self.bad_pairs: Sequence[BadPairs | None] = [group.bad_pairs for group in groups]
        """Those of each group. Explanations keep it, so it is replaced and not changed."""
        # One array for both sides, so that one `take` selects the tokens of all candidates; `_split` returns views of it.
        targets = [*self.prefills.targets, *self.decodes.targets]
        self._block_sizes: Positions = np.array([target.block_size_tokens for target in targets], dtype=np.intp)
        has_common_size = bool(targets) and np.ptp(self._block_sizes) == 0
        self._common_block_size = targets[0].block_size_tokens if has_common_size else 0
        self.key = object()
        """Stands for the pool in the cache of cached tokens."""
        self.no_tokens = self._split(np.zeros(len(targets)))
        # A placeholder: version -1 makes the first call of `select_tokens` read the bits.
        self._bits = self._block_sizes
        self._holders_version = -1
        self._reduced: dict[frozenset[str], Pool] = {}

    def set_slow(self, factors: SlowFactors, version: int) -> None:
        """Takes the slow pairs. Does nothing if it has those of this version."""
        if version != self.slow_version:
            self.slow_version = version
            self._set_bad_pairs(self.groups, factors)
            self.bad_pairs = [group.bad_pairs for group in self.groups]

    def _set_bad_pairs(self, groups: Iterable[Group], factors: SlowFactors) -> None:
        for group in groups:
            group.bad_pairs = make_bad_pairs(
                self.prefills.targets[group.prefills],
                self.decodes.targets[group.decodes],
                factors,
                distances_to=group.distances_to,
            )

    def without(self, paused: frozenset[str]) -> "Pool":
        """Returns the pool for a frontend that has lost the workers `paused`. It may have no candidates."""
        known = self._reduced.get(paused)
        if known is None:
            if len(self._reduced) >= _REDUCED_MAX:
                self._reduced.clear()
            sides = self.prefills.targets, self.decodes.targets
            prefills, decodes = ([t for t in side if t.worker.worker_id not in paused] for side in sides)
            left_out = {t.worker.worker_id: t.worker for side in sides for t in side if t.worker.worker_id in paused}
            removed = [*self.removed, *((worker, PATH_OPEN) for _, worker in sorted(left_out.items()))]
            known = self._reduced[paused] = Pool(prefills, decodes, removed=removed)
        return known

    def select_tokens(self, by_bit: Floats, *, block_size_tokens: int, holders_version: int) -> CandidateTokens:
        """Returns the tokens of a prompt that each candidate has cached, given those of each holder.

        Hashes of another block size name other blocks. `holders_version` changes when a target may have got another bit.
        """
        if self._holders_version != holders_version:
            targets = [*self.prefills.targets, *self.decodes.targets]
            self._bits = np.array([target.bits[target.rank] for target in targets], dtype=np.intp)
            self._holders_version = holders_version
        tokens = by_bit.take(self._bits, mode="clip")
        if block_size_tokens != self._common_block_size:
            tokens *= self._block_sizes == block_size_tokens
        return self._split(tokens)

    def _split(self, tokens: Floats) -> CandidateTokens:
        # Decisions share the arrays.
        tokens.flags.writeable = False
        prefills = len(self.prefills.targets)
        decode = tokens[prefills:]
        return CandidateTokens(prefill=tokens[:prefills], decode=decode, decode_max=float(decode.max(initial=0)))


def _unpaired(groups: Iterable[Group], decodes: int) -> NDArray[np.bool_] | None:
    unpaired = np.zeros(decodes, dtype=np.bool_)
    for group in groups:
        if (bad := group.bad_pairs) is not None:
            unpaired[group.decodes.start + bad.decodes] = bad.is_failing.all(0)
    return unpaired if unpaired.any() else None


class Pools:
    """The pools of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = -1
        self._pools: dict[RequestKind, Pool | MeshError] = {}
        self._removed: dict[RequestKind, Sequence[tuple[RegisteredWorker, str]]] = {}
        self._plain_pools: dict[tuple[str, str, str], Pool] = {}

    def get(self, ask: Ask) -> Pool:
        """Returns the candidates. Raises the error that requests of this kind are refused with when there is no decode worker."""
        # Callers choose models, adapters and labels, so the number of kinds needs a limit.
        if self._version != self._fleet.version or len(self._pools) > _POOLS_MAX:
            self._pools.clear()
            self._removed.clear()
            self._plain_pools.clear()
            self._version = self._fleet.version
        if ask.required_features or ask.required_labels:
            return self._get(RequestKind.of(ask))
        # To make and hash the kind takes a tenth of a decision, and most requests need nothing special.
        plain = (ask.model, ask.adapter, ask.files_digest)
        known = self._plain_pools.get(plain)
        if known is None:
            known = self._plain_pools[plain] = self._get(RequestKind.of(ask))
        return known

    def removed(self, ask: Ask) -> Sequence[tuple[RegisteredWorker, str]]:
        """Returns the workers that a filter removed when `get` was last called for requests of this kind, with the filter's name."""
        return self._removed.get(RequestKind.of(ask), ())

    def _get(self, kind: RequestKind) -> Pool:
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = self._build(kind)
        if isinstance(pool, MeshError):
            # A new error each time: a raised one carries its traceback, and its catcher adds to it.
            raise type(pool)(pool.message, reason=pool.reason, field=pool.field, retry_after_s=pool.retry_after_s)
        return pool

    def _build(self, kind: RequestKind) -> Pool | MeshError:
        removed: list[tuple[RegisteredWorker, str]] = []
        self._removed[kind] = removed
        kept: dict[Role, list[Target]] = {Role.PREFILL: [], Role.DECODE: []}
        workers = [
            worker
            for _, worker in sorted(self._fleet.workers.items())
            if worker.description is not None and worker.model_name == kind.model
        ]
        decode_keys = {worker.exchange_key for worker in workers if worker.role is Role.DECODE} - {None}
        for worker in workers:
            reason = _removed_by(worker, kind)
            if not reason and worker.role is Role.PREFILL and worker.exchange_key not in decode_keys:
                reason = "incompatible"
            if reason:
                removed.append((worker, reason))
            elif worker.role in kept:
                kept[worker.role].extend(worker.targets)
        if not kept[Role.DECODE]:
            return self._refusal(kind, workers, removed)
        return Pool(kept[Role.PREFILL], kept[Role.DECODE], removed=removed)

    def _refusal(
        self, kind: RequestKind, workers: Sequence[RegisteredWorker], removed: Iterable[tuple[RegisteredWorker, str]]
    ) -> MeshError:
        """Returns why no decode worker is left: the first reason that a retry would not change, else that none is available."""
        decodes = [worker for worker in workers if worker.role is Role.DECODE]
        reasons = {reason for worker, reason in removed if worker.role is Role.DECODE}
        if not workers:
            connecting = any(worker.description is None for worker in self._fleet.workers.values())
            if connecting or not self._fleet.workers:
                return self._unavailable(f"no worker for model {kind.model!r} has joined yet")
            return NotFoundError(
                f"no worker serves a model named {kind.model!r}", reason="model_not_found", field="model"
            )
        if decodes and reasons == {"adapter"}:
            message = f"no worker of model {kind.model!r} has the adapter {kind.adapter!r}"
            return NotFoundError(message, reason="adapter_not_found", field="adapter")
        if decodes and reasons <= {"adapter", "features"}:
            return self._unsupported(kind, decodes)
        if decodes and reasons <= {"adapter", "features", "labels"}:
            labels = ", ".join(f"{name}={value}" for name, value in sorted(kind.labels))
            message = f"no worker of model {kind.model!r} carries the labels {labels}"
            return UnsupportedError(message, reason="no_such_labels", field="required_labels")
        state = ", ".join(sorted(reasons)) if reasons else "none has joined"
        return self._unavailable(f"no decode worker of model {kind.model!r} takes requests ({state})")

    def _unsupported(self, kind: RequestKind, decodes: Iterable[RegisteredWorker]) -> UnsupportedError:
        lacking = sorted(kind.features.difference(*map(_features_of, decodes)) or kind.features)
        engines = {
            worker.description.capabilities.engine
            for worker in self._fleet.workers.values()
            # A prefill worker alone cannot answer.
            if worker.description is not None and worker.role is Role.DECODE and kind.features <= _features_of(worker)
        }
        who = f"engines here that can: {', '.join(sorted(engines))}" if engines else "no engine of this mesh can"
        message = f"no worker of model {kind.model!r} can do {', '.join(lacking)}; {who}"
        return UnsupportedError(message, reason="feature_unsupported", field="required_features")

    def _unavailable(self, message: str) -> UnavailableError:
        return UnavailableError(message, reason="no_worker", retry_after_s=RETRY_AFTER_S)


def _removed_by(worker: RegisteredWorker, kind: RequestKind) -> str:
    """Returns the filter that removes a worker of the model; empty: none."""
    description = worker.description
    assert description is not None
    if kind.files_digest and kind.files_digest != description.model.files_digest:
        return "files"
    if kind.adapter and kind.adapter not in description.model.adapters:
        return "adapter"
    if not kind.features.issubset(description.capabilities.features):
        return "features"
    if not kind.labels.issubset(worker.labels.items()):
        return "labels"
    return worker.excluded_by


def _features_of(worker: RegisteredWorker) -> set[str]:
    return set(worker.description.capabilities.features) if worker.description is not None else set()
