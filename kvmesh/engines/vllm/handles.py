"""What a handle's payload says, and whether it may be pulled here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.core import KvHandle
from kvmesh.errors import KvLostError
from kvmesh.kv.blocks import chain_hash, pack_tokens

PREFILL_PARAMETERS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "tp_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleForm:
    """What handles of this engine look like: only equal ones are read."""

    format: str
    compatibility_hash: str
    block_size_tokens: int
    kv_bytes_per_block: int = 0


def prompt_hash(seed: int, token_ids: Sequence[int]) -> str:
    """Names the prompt whose KV a handle holds; adapter and salt are in the seed."""
    return f"{chain_hash(seed, pack_tokens(token_ids)):016x}"


def make_handle(
    form: HandleForm, parameters: Mapping[str, Any], *, tokens: int, prompt: str, lease_s: float
) -> KvHandle:
    """A handle from what vLLM's connector returned at the end of a prefill. The worker adds its id and epoch."""
    blocks = sum(len(group) for group in parameters["remote_block_ids"])
    payload = {"prompt": prompt, "parameters": dict(parameters)}
    return KvHandle(
        handle_id=parameters["remote_request_id"],
        format=form.format,
        compatibility_hash=form.compatibility_hash,
        payload=json.dumps(payload).encode(),
        worker_id="",
        worker_epoch=0,
        tokens=tokens,
        lease_s=lease_s,
        kv_bytes=blocks * form.kv_bytes_per_block or None,
    )


def read_handle(form: HandleForm, handle: KvHandle, *, tokens: int, prompt: str) -> dict[str, Any]:
    """The connector's parameters for pulling. KvLostError when the handle can never be read for this prompt."""
    if handle.format != form.format:
        raise KvLostError(f"this engine reads {form.format}, not {handle.format}", reason="kv_format", field="handle")
    if handle.compatibility_hash != form.compatibility_hash:
        # Unequal block sizes are among what the hash covers: vLLM itself would answer with wrong tokens.
        raise KvLostError("the handle's KV does not fit this engine", reason="kv_incompatible", field="handle")
    try:
        payload = json.loads(handle.payload)
        parameters: dict[str, Any] = payload["parameters"]
        is_whole = all(parameters[name] is not None for name in REQUIRED)
        blocks = [len(group) for group in parameters["remote_block_ids"]]
        its_prompt = payload["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle") from error
    if not is_whole or not blocks or max(blocks) != -(-tokens // form.block_size_tokens):
        raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle")
    if handle.tokens != tokens or its_prompt != prompt:
        raise KvLostError("the handle holds another prompt's KV", reason="kv_prompt", field="handle")
    return parameters
