"""The values of the mesh: plain data, used by all other packages."""

from kvmesh.core.generation import Generation, Media, MediaKind
from kvmesh.core.inspection import Candidate, Coefficient, EarlierPlacement, Explanation, WorkerView
from kvmesh.core.kv import KvBatch, KvCleared, KvEvent, KvHandle, KvReader, KvRemoved, KvStored, KvTier, Rendezvous
from kvmesh.core.leg import Leg, LegFinish, LegTask
from kvmesh.core.output import FinishReason, TokenLogprob, Usage
from kvmesh.core.routing import Ask, PeerReservation, PeerUpdate, Placement, Report, ReportKind
from kvmesh.core.sampling import Constraint, ConstraintKind, SamplingParams
from kvmesh.core.worker import (
    Capabilities,
    FailingKvPath,
    Handoff,
    KvPath,
    KvPathCheck,
    LoadRecord,
    ModelCard,
    PerformanceProfile,
    Role,
    WorkerDescription,
    WorkerRef,
)

__all__ = [
    "Ask",
    "Candidate",
    "Capabilities",
    "Coefficient",
    "Constraint",
    "ConstraintKind",
    "EarlierPlacement",
    "Explanation",
    "FailingKvPath",
    "FinishReason",
    "Generation",
    "Handoff",
    "KvBatch",
    "KvCleared",
    "KvEvent",
    "KvHandle",
    "KvPath",
    "KvPathCheck",
    "KvReader",
    "KvRemoved",
    "KvStored",
    "KvTier",
    "Leg",
    "LegFinish",
    "LegTask",
    "LoadRecord",
    "Media",
    "MediaKind",
    "ModelCard",
    "PeerReservation",
    "PeerUpdate",
    "PerformanceProfile",
    "Placement",
    "Rendezvous",
    "Report",
    "ReportKind",
    "Role",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "WorkerDescription",
    "WorkerRef",
    "WorkerView",
]
