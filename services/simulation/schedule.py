"""One run as plain data: the mesh, the requests and the faults, each with its time. It can be printed, stored as JSON, replayed and shrunk."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvmesh.errors import InvalidRequestError

VERSION = 1
COUNT_MAX = 64
"""Most processes of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The mesh. `rendezvous`: both legs of a request start at the same time, as with SGLang; otherwise decode pulls after prefill.

    `is_tight`: few KV blocks and small batches, so that caches are evicted, requests preempted and queues form. `is_crowded`: routers
    queue requests. `kv_groups`: workers exchange KV only within their group.
    """

    prefill: int = 2
    decode: int = 3
    routers: int = 2
    frontends: int = 2
    rendezvous: bool = False
    is_tight: bool = False
    is_crowded: bool = False
    kv_groups: int = 1
    decode_tokens_per_step: int = 1
    output_tokens_max: int = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A request. Its prompt is the begin of a text that requests of one `family` share, and a tail of its own. `has_tools`: its answer
    must be tool calls.

    `cancel_after_s` counts from the phase `cancel_phase`, or from the arrival if that is empty; None: not cancelled.
    """

    request_id: str
    at_s: float
    frontend: int = 0
    family: int = 0
    prefix_tokens: int = 0
    tail_seed: int = 0
    tail_tokens: int = 1
    is_text: bool = False
    is_whole: bool = False
    max_tokens: int = 8
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    has_tools: bool = False
    choices: int = 1
    cache_salt: str = ""
    priority: int = 0
    session_id: str = ""
    adapter: str = ""
    timeout_s: float | None = None
    cancel_phase: str = ""
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFault:
    """A fault from `at_s` on, for `duration_s`.

    `target` is a process, `other` the other end of a connection. The meaning of `amount` depends on the kind.
    """

    at_s: float
    kind: str
    target: str = ""
    other: str = ""
    duration_s: float = 0.0
    amount: float = 0.0

    @property
    def end_s(self) -> float:
        """When it is undone."""
        return self.at_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A run. Times count from the moment at which the mesh is ready. `seed` draws latencies and everything else that is random.

    `is_survivable`: in each pool one worker has no fault that takes it away, so every request must be answered.
    """

    seed: int
    topology: Topology = field(default_factory=Topology)
    requests: tuple[RequestPlan, ...] = ()
    faults: tuple[TimedFault, ...] = ()
    is_survivable: bool = True
    version: int = VERSION

    @property
    def ends_s(self) -> float:
        """When the last fault is undone and the last request has arrived."""
        return max([0.0, *(fault.end_s for fault in self.faults), *(each.at_s for each in self.requests)])

    def write(self, path: Path) -> None:
        """Writes the schedule as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_schedule(path: Path) -> Schedule:
    """Reads what `Schedule.write` wrote. Raises InvalidRequestError with the field."""
    try:
        schedule = msgspec.json.decode(path.read_bytes(), type=Schedule)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{path} is not a schedule: {error}", field="replay") from None
    if schedule.version != VERSION:
        raise InvalidRequestError(f"{path} has version {schedule.version}, not {VERSION}", field="version")
    check_topology(schedule.topology)
    return schedule


def check_topology(topology: Topology) -> None:
    """Raises InvalidRequestError for a mesh that cannot serve."""
    for name, least in (("prefill", 0), ("decode", 1), ("routers", 1), ("frontends", 1), ("kv_groups", 1)):
        value = getattr(topology, name)
        if not least <= value <= COUNT_MAX:
            raise InvalidRequestError(f"{name} must be {least} to {COUNT_MAX}", field=name)
    if topology.rendezvous and topology.prefill < topology.kv_groups:
        raise InvalidRequestError("a rendezvous needs a prefill worker in each KV group", field="prefill")
