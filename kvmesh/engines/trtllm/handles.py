"""Packs and checks the payload of handles: the engine's DisaggregatedParams, which only an engine of the same format reads."""

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvmesh.core import KvHandle
from kvmesh.engines.handles import HandleForm, pack_json, unpack_json
from kvmesh.engines.trtllm.sampling import GENERATION
from kvmesh.errors import KvLostError

if TYPE_CHECKING:
    from tensorrt_llm.disaggregated_params import DisaggregatedParams

PLAIN = ("ctx_request_id", "draft_tokens", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint")
"""Fields of DisaggregatedParams that are numbers or texts. `first_gen_tokens` travel in the handle itself."""


def make_handle(
    form: HandleForm, params: "DisaggregatedParams", *, handle_id: str, tokens: int, prompt: str, lease_s: float
) -> KvHandle:
    """Returns a handle from the result of a context phase. The worker adds its id and epoch. ValueError: there was no handoff."""
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


def read_handle(form: HandleForm, handle: KvHandle, *, tokens: int, prompt: str) -> "DisaggregatedParams":
    """Parameters of the generation phase. KvLostError when the handle can never be read for this prompt."""
    form.check(handle)
    try:
        its_prompt, params = unpack(handle.payload, handle.first_token_ids)
    except (ValueError, KeyError, TypeError) as error:
        raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle") from error
    if handle.tokens != tokens or its_prompt != prompt or not handle.first_token_ids:
        raise KvLostError("the handle holds another prompt's KV", reason="kv_prompt", field="handle")
    return params


def pack(prompt: str, params: "DisaggregatedParams") -> bytes:
    values: dict[str, Any] = {name: getattr(params, name) for name in PLAIN}
    values["opaque_state"] = None if params.opaque_state is None else base64.b64encode(params.opaque_state).decode()
    values["first_gen_log_probs"] = [pack_logprob(each) for each in params.first_gen_log_probs or ()]
    return pack_json({"prompt": prompt, "values": values})


def unpack(payload: bytes, first_token_ids: Sequence[int]) -> tuple[str, "DisaggregatedParams"]:
    """Prompt hash and parameters. ValueError, KeyError or TypeError when `pack` did not make the payload."""
    from tensorrt_llm.disaggregated_params import DisaggregatedParams

    data = unpack_json(payload)
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
    """Returns one position: a number, or alternatives by token id."""
    if not isinstance(entry, dict):
        return float(entry)
    return [[token_id, value.logprob, value.rank] for token_id, value in entry.items()]


def unpack_logprob(entry: Any) -> Any:
    if not isinstance(entry, list):
        return entry
    from tensorrt_llm.executor.result import Logprob

    return {int(token_id): Logprob(logprob, rank) for token_id, logprob, rank in entry}
