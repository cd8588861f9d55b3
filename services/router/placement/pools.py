"""Who could take a request of a kind: the filters that do not depend on the single request, remembered per kind.

A kind is the model, the adapter, the features and the labels that a request asks for. Its pool is made once per version of
the fleet, so an ordinary request pays for weighing only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvmesh.core import Ask, Role
from kvmesh.errors import MeshError, NotFoundError, UnavailableError, UnsupportedError
from services.router.index.cached_tokens import Held
from services.router.placement.sheet import Sheet
from services.router.placement.topology import Group, groups, order
from services.router.workers.board import Board, Floats, Positions
from services.router.workers.fleet import Fleet, Worker
from services.router.workers.target import Target

_POOLS_MAX = 256
_LABELS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a request needs of any worker."""

    model: str
    adapter: str
    features: frozenset[str]
    labels: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, ask: Ask) -> "Kind":
        """The kind of a request."""
        return cls(
            model=ask.model,
            adapter=ask.adapter,
            features=frozenset(ask.required_features),
            labels=frozenset(ask.required_labels.items()),
        )


class Side:
    """Candidates for one leg, sorted as `topology.order` says, with their columns of the board."""

    __slots__ = ("_lacking", "_places", "columns", "targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self.columns: Positions = np.array([target.column for target in targets], dtype=np.intp)
        self._lacking: dict[frozenset[tuple[str, str]], Floats] = {}
        self._places: dict[Target, int] | None = None

    def lacking(self, labels: Mapping[str, str]) -> Floats:
        """1 for candidates that lack one of the labels, else 0."""
        wanted = frozenset(labels.items())
        known = self._lacking.get(wanted)
        if known is None:
            if len(self._lacking) >= _LABELS_MAX:
                self._lacking.clear()
            known = np.array([float(not wanted <= target.worker.labels.items()) for target in self.targets])
            self._lacking[wanted] = known
        return known

    def not_warm(self, adapter: str) -> Floats:
        """1 for candidates that have not run the adapter lately, else 0."""
        return np.array([float(adapter not in target.adapters) for target in self.targets])

    def place_of(self, target: Target) -> int | None:
        """Where a target stands; None: it is no candidate."""
        if self._places is None:
            self._places = {target: place for place, target in enumerate(self.targets)}
        return self._places.get(target)


class Pool:
    """Candidates of one kind. `groups`: which of them can exchange KV.

    `removed` holds, for explanations, the workers of the model that a filter took off, with the filter's name.
    """

    __slots__ = ("_bits", "_bits_version", "_block_sizes", "decodes", "groups", "prefills", "removed", "sheet", "split")

    def __init__(
        self,
        prefills: Iterable[Target],
        decodes: Iterable[Target],
        removed: Sequence[tuple[Worker, str]],
        board: Board,
    ) -> None:
        self.prefills, self.decodes = Side(sorted(prefills, key=order)), Side(sorted(decodes, key=order))
        self.groups: Sequence[Group] = groups(self.prefills.targets, self.decodes.targets)
        self.removed = removed
        self.split = len(self.prefills.targets)
        self.sheet: Sheet | None = None
        """For pools in which every pair can exchange KV."""
        if len(self.groups) == 1 and self.groups[0].is_whole:
            self.sheet = Sheet(self.groups[0], self.prefills.targets, self.decodes.targets, board)
        sizes = [target.block_size_tokens for target in self._targets()]
        self._block_sizes: int | Positions = sizes[0] if len(set(sizes)) == 1 else np.array(sizes, dtype=np.intp)
        self._bits: Positions = np.zeros(0, dtype=np.intp)
        self._bits_version = -1

    def held(self, held: Held, bits_version: int) -> Held:
        """Works out, once, what its candidates have of the prompt. Hashes of another block size name other blocks."""
        if self._bits_version != bits_version:
            self._bits = np.array([target.bits[target.rank] for target in self._targets()], dtype=np.intp)
            self._bits_version = bits_version
        if held.bits is not self._bits:
            held.bits = self._bits
            held.tokens = tokens = self._held_tokens(held)
            held.decode_most = 0.0
            if tokens is not None and self.decodes.targets:
                tokens.flags.writeable = False
                of_decodes = tokens[self.split :]
                held.decode_most = of_decodes.item(of_decodes.argmax())
        return held

    def _held_tokens(self, held: Held) -> Floats | None:
        sizes = self._block_sizes
        if sizes.__class__ is int and sizes != held.block_size_tokens:
            return None
        tokens: Floats = held.by_bit.take(self._bits, mode="clip")
        if sizes.__class__ is not int:
            tokens[sizes != held.block_size_tokens] = 0.0
        return tokens

    def _targets(self) -> Iterable[Target]:
        return chain(self.prefills.targets, self.decodes.targets)


class Pools:
    """The pools of a fleet."""

    def __init__(self, fleet: Fleet, *, retry_after_s: float) -> None:
        self._fleet = fleet
        self._retry_after_s = retry_after_s
        self._version = -1
        self._known: dict[Kind, Pool | MeshError] = {}
        self._removed: dict[Kind, Sequence[tuple[Worker, str]]] = {}
        self._plain: dict[tuple[str, str], Pool] = {}

    def pool_of(self, ask: Ask) -> Pool:
        """The candidates; raises what a request of this kind is refused with when there is none."""
        if self._version != self._fleet.version or len(self._known) > _POOLS_MAX:
            self._known.clear()
            self._removed.clear()
            self._plain.clear()
            self._version = self._fleet.version
        if ask.required_features or ask.required_labels:
            return self._pool(Kind.of(ask))
        # Most asks want nothing special; making and hashing their kind would cost a tenth of the decision.
        plain = (ask.model, ask.adapter)
        known = self._plain.get(plain)
        if known is None:
            known = self._plain[plain] = self._pool(Kind.of(ask))
        return known

    def _pool(self, kind: Kind) -> Pool:
        pool = self._known.get(kind)
        if pool is None:
            pool = self._known[kind] = self._make(kind)
        if isinstance(pool, MeshError):
            # A fresh error each time: a raised one carries its traceback and is filled in by whoever catches it.
            raise type(pool)(pool.message, reason=pool.reason, field=pool.field, retry_after_s=pool.retry_after_s)
        return pool

    def removed(self, kind: Kind) -> Sequence[tuple[Worker, str]]:
        """Who was taken off, and by which filter, when `pool` gave or refused it last."""
        return self._removed.get(kind, ())

    def _make(self, kind: Kind) -> Pool | MeshError:
        removed: list[tuple[Worker, str]] = []
        self._removed[kind] = removed
        kept: dict[Role, list[Target]] = {Role.PREFILL: [], Role.DECODE: []}
        workers = [worker for _, worker in sorted(self._fleet.workers.items()) if serves(worker, kind.model)]
        takers = {worker.pairs_as for worker in workers if worker.role is Role.DECODE} - {None}
        for worker in workers:
            filter_name = self._removed_by(worker, kind)
            if not filter_name and worker.role is Role.PREFILL and worker.pairs_as not in takers:
                filter_name = "incompatible"
            if filter_name:
                removed.append((worker, filter_name))
            elif worker.role in kept:
                kept[worker.role].extend(worker.targets)
        if not kept[Role.DECODE]:
            return self._refusal(kind, workers, removed)
        return Pool(kept[Role.PREFILL], kept[Role.DECODE], removed, self._fleet.board)

    def _removed_by(self, worker: Worker, kind: Kind) -> str:
        description = worker.description
        assert description is not None
        if kind.adapter and kind.adapter not in description.model.adapters:
            return "adapter"
        if not kind.features.issubset(description.capabilities.features):
            return "features"
        if not kind.labels.issubset(worker.labels.items()):
            return "labels"
        return worker.excluded_by

    def _refusal(self, kind: Kind, workers: Sequence[Worker], removed: Iterable[tuple[Worker, str]]) -> MeshError:
        """Why no decode worker is left: the first reason that trying again would not change, else absence."""
        decodes = [worker for worker in workers if worker.role is Role.DECODE]
        reasons = {reason for worker, reason in removed if worker.role is Role.DECODE}
        if not workers:
            connecting = any(worker.description is None for worker in self._fleet.workers.values())
            if connecting or not self._fleet.workers:
                return self._unavailable(f"no worker for model {kind.model!r} has joined yet", "no_worker")
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
        return self._unavailable(f"no decode worker of model {kind.model!r} takes requests ({state})", "no_worker")

    def _unsupported(self, kind: Kind, decodes: Iterable[Worker]) -> UnsupportedError:
        lacking = sorted(kind.features.difference(*map(features, decodes)) or kind.features)
        engines = {
            worker.description.capabilities.engine
            for worker in self._fleet.workers.values()
            if worker.description is not None and kind.features <= features(worker)
        }
        who = f"engines here that can: {', '.join(sorted(engines))}" if engines else "no engine of this mesh can"
        message = f"no worker of model {kind.model!r} can do {', '.join(lacking)}; {who}"
        return UnsupportedError(message, reason="feature_unsupported", field="required_features")

    def _unavailable(self, message: str, reason: str) -> UnavailableError:
        return UnavailableError(message, reason=reason, retry_after_s=self._retry_after_s)


def serves(worker: Worker, model: str) -> bool:
    """True when the worker is known to serve the model."""
    return worker.description is not None and worker.description.model.name == model


def features(worker: Worker) -> set[str]:
    """What its engine can do; nothing while it is unknown."""
    return set(worker.description.capabilities.features) if worker.description is not None else set()
