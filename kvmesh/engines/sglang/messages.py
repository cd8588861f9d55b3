"""Messages between the adapter and the engine process, as length-prefixed msgpack on a Unix socket.

Both ends come from the same source tree, so the format has no versions. `number` identifies a leg in the engine process; numbers are not
used again.
"""

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Any

import msgspec

_LENGTH = Struct("<I")
ALIVE_INTERVAL_S = 0.5


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: the engine's settings, as fields of SglangSettings."""

    settings: dict[str, Any]


class Meeting(msgspec.Struct, array_like=True, frozen=True):
    """SGLang's bootstrap address and room. Each data-parallel rank has a bootstrap server of its own."""

    host: str
    port: int
    room: int


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True, kw_only=True):
    """A leg. `token_ids` are little-endian 32-bit words, `sampling` the arguments of SGLang's SamplingParams.

    `logprobs` and `prompt_logprobs` are numbers of alternatives; None: not asked.
    """

    number: int
    token_ids: bytes
    sampling: dict[str, Any]
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    adapter: str
    adapter_id: str
    cache_salt: str
    is_embedding: bool
    dimensions: int | None
    meeting: Meeting | None


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """Ends a leg. Unknown numbers are ignored."""

    number: int


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """An operation: reset_cache; load_adapter or unload_adapter with name, id and path; set_role with the role; snapshot."""

    call_id: int
    operation: str
    arguments: Sequence[str] = ()


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True, kw_only=True):
    """The engine runs."""

    version: str
    is_cpu: bool
    context_tokens_max: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]
    sampling_defaults: dict[str, Any]
    block_size_tokens: int
    kv_blocks_total: int
    kv_bytes_per_token: int
    running_requests_max: int
    has_tokenizer: bool
    honors_seeds: bool
    is_embedding: bool
    compatibility_factors: dict[str, str]
    bootstrap_port: int


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine did not start, or has died. `kind` is the name of the exception's class."""

    kind: str
    message: str


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """Sent every ALIVE_INTERVAL_S, also while a step takes long: the process runs."""


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """The first output of a leg."""

    number: int
    cached_tokens: int
    queue_s: float


class Finished(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The end of a leg. `kind` is SGLang's: stop, length or abort. `status` is the HTTP status of a failure; 0: none."""

    number: int
    kind: str
    matched: int | None = None
    message: str = ""
    status: int = 0
    embedding: Sequence[float] | None = None


class HostLoad(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Names as in LoadRecord."""

    step: int
    step_s: float
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    kv_tokens_used: int
    preempted_requests_total: int
    bootstrapping_requests: int = 0
    sending_requests: int = 0
    preallocating_requests: int = 0
    receiving_requests: int = 0
    retracted_requests: int = 0
    kv_tokens_cached: int = 0
    kv_tokens_unaccounted: int | None = None


Alternatives = Sequence[tuple[int, float]]
Logprob = tuple[float, Alternatives]
KvChange = tuple[str, Sequence[int], int | None, str]
"""Kind (`stored`, `removed`, `cleared`), mesh block hashes, mesh hash of the parent, tier."""


class HostStep(msgspec.Struct, tag="step", array_like=True, frozen=True, kw_only=True):
    """What changed since the last message: leg `numbers[i]` got the next `counts[i]` ids of `token_ids`."""

    load: HostLoad
    numbers: Sequence[int] = ()
    counts: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    begun: Sequence[Begun] = ()
    finished: Sequence[Finished] = ()
    logprobs: Mapping[int, Sequence[Logprob]] = {}
    prompt_logprobs: Mapping[int, Sequence[Logprob]] = {}
    kv_changes: Sequence[KvChange] = ()


class CallResult(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """The result of a Call. `problem` is empty when it succeeded."""

    call_id: int
    is_done: bool
    problem: str = ""


class Snapshot(msgspec.Struct, tag="snapshot", array_like=True, frozen=True):
    """The answer to the call `snapshot`: changes that lead from an empty cache to the present one."""

    kv_changes: Sequence[KvChange]


ToHost = Start | Submit | Cancel | Call
FromHost = Ready | Failed | Alive | HostStep | CallResult | Snapshot
_encoder = msgspec.msgpack.Encoder()
to_host_decoder = msgspec.msgpack.Decoder(ToHost)
from_host_decoder = msgspec.msgpack.Decoder(FromHost)


def frame(message: ToHost | FromHost) -> bytes:
    """Returns a message with its length."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Removes complete messages from the start of `received`."""
    start = 0
    try:
        while len(received) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(received, start)[0]
            if len(received) < end:
                return
            body = bytes(received[start + _LENGTH.size : end])
            start = end
            yield body
    finally:
        # Also if the consumer raises: the messages that it has taken are not taken again.
        del received[:start]
