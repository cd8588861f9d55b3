"""Packs and checks the payload of handles: the engine's DisaggregatedParams, which only an engine of the same format reads."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from kvmesh.core import KvHandle
from kvmesh.engines.trtllm.sampling import GENERATION
from kvmesh.errors import KvLostError
from kvmesh.kv.blocks import chain_hash, pack_tokens

if TYPE_CHECKING:
    from tensorrt_llm.disaggregated_params import DisaggregatedParams

PLAIN = ("ctx_request_id", "draft_tokens", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint")
"""Fields of DisaggregatedParams that are numbers or texts. `first_gen_tokens` travel in the handle itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmHandleForm:
    """The form of an engine's handles. An engine reads handles of its own form only."""

    format: str
    compatibility_hash: str
    block_size_tokens: int


def prompt_hash(seed: int, token_ids: Sequence[int]) -> str:
    """Identifies the prompt whose KV a handle holds. The seed includes adapter and salt."""
    return f"{chain_hash(seed, pack_tokens(token_ids)):016x}"


def make_handle(
    form: TrtllmHandleForm, params: "DisaggregatedParams", *, handle_id: str, tokens: int, prompt: str, lease_s: float
) -> KvHandle:
    """A handle from the result of a context phase. The worker adds its id and epoch. ValueError: there was no handoff."""
    if params.ctx_request_id is None or not params.first_gen_tokens:
        raise ValueError("the context phase did not hand over")
    return KvHandle(
        handle_id=handle_id,
        format=form.format,
        compatibility_hash=form.compatibility_hash,
        payload=pack(prompt, params),
        worker_id="",
        worker_epoch=0,
        tokens=tokens,
        lease_s=lease_s,
        first_token_ids=tuple(params.first_gen_tokens),
    )


def read_handle(form: TrtllmHandleForm, handle: KvHandle, *, tokens: int, prompt: str) -> "DisaggregatedParams":
    """Parameters of the generation phase. KvLostError when the handle can never be read for this prompt."""
    if handle.format != form.format:
        raise KvLostError(f"this engine reads {form.format}, not {handle.format}", reason="kv_format", field="handle")
    if handle.compatibility_hash != form.compatibility_hash:
        raise KvLostError("the handle's KV does not fit this engine", reason="kv_incompatible", field="handle")
    try:
        its_prompt, params = unpack(handle.payload, handle.first_token_ids)
    except (ValueError, KeyError, TypeError) as error:
        raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle") from error
    if handle.tokens != tokens or its_prompt != prompt or not handle.first_token_ids:
        raise KvLostError("the handle holds another prompt's KV", reason="kv_prompt", field="handle")
    return params


def pack(prompt: str, params: "DisaggregatedParams") -> bytes:
    """JSON, preceded by its checksum."""
    values: dict[str, Any] = {name: getattr(params, name) for name in PLAIN}
    values["opaque_state"] = None if params.opaque_state is None else base64.b64encode(params.opaque_state).decode()
    values["first_gen_log_probs"] = [pack_logprob(each) for each in params.first_gen_log_probs or ()]
    body = json.dumps({"prompt": prompt, "values": values}).encode()
    return b"%016x" % xxh3_64_intdigest(body) + body


def unpack(payload: bytes, first_token_ids: Sequence[int]) -> tuple[str, "DisaggregatedParams"]:
    """Prompt hash and parameters. ValueError, KeyError or TypeError when `pack` did not make the payload."""
    from tensorrt_llm.disaggregated_params import DisaggregatedParams

    body = payload[16:]
    if int(payload[:16], 16) != xxh3_64_intdigest(body):
        raise ValueError("wrong checksum")
    data = json.loads(body)
    values = dict(data["values"])
    opaque, logprobs = values.pop("opaque_state"), values.pop("first_gen_log_probs")
    params = DisaggregatedParams(
        request_type=GENERATION,
        first_gen_tokens=list(first_token_ids),
        opaque_state=None if opaque is None else base64.b64decode(opaque, validate=True),
        first_gen_log_probs=[unpack_logprob(each) for each in logprobs] or None,
        **values,
    )
    return str(data["prompt"]), params


def pack_logprob(entry: Any) -> Any:
    """One position: a number, or alternatives by token id."""
    if not isinstance(entry, dict):
        return float(entry)
    return [[token_id, value.logprob, value.rank] for token_id, value in entry.items()]


def unpack_logprob(entry: Any) -> Any:
    if not isinstance(entry, list):
        return entry
    from tensorrt_llm.executor.result import Logprob

    return {int(token_id): Logprob(logprob, rank) for token_id, logprob, rank in entry}
