"""Packs and checks the payload of handles."""

from collections.abc import Mapping
from typing import Any

from kvmesh.core import KvHandle
from kvmesh.engines.handles import HandleForm, pack_json, unpack_json
from kvmesh.errors import KvLostError

PREFILL_PARAMETERS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_handle(
    form: HandleForm, parameters: Mapping[str, Any], *, tokens: int, prompt: str, lease_s: float
) -> KvHandle:
    """Returns a handle from the parameters that vLLM's connector returned. The worker adds its id and epoch."""
    blocks = sum(len(group) for group in parameters["remote_block_ids"])
    return KvHandle(
        handle_id=parameters["remote_request_id"],
        format=form.format,
        compatibility_hash=form.compatibility_hash,
        payload=pack(prompt, parameters),
        worker_id="",
        worker_epoch=0,
        tokens=tokens,
        lease_s=lease_s,
        kv_bytes=blocks * form.kv_bytes_per_block or None,
    )


def read_handle(form: HandleForm, handle: KvHandle, *, tokens: int, prompt: str) -> dict[str, Any]:
    """Returns the connector's parameters for the pull. KvLostError when the handle can never be read for this prompt."""
    # With unequal block sizes vLLM itself would answer with wrong tokens.
    form.check(handle)
    try:
        its_prompt, parameters = unpack(handle.payload)
        is_valid = are_valid(parameters, blocks=-(-tokens // form.block_size_tokens))
    except (ValueError, KeyError, TypeError) as error:
        raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle") from error
    if not is_valid:
        raise KvLostError("the handle's payload does not fit the prompt", reason="kv_payload", field="handle")
    if handle.tokens != tokens or its_prompt != prompt:
        raise KvLostError("the handle holds another prompt's KV", reason="kv_prompt", field="handle")
    return parameters


def pack(prompt: str, parameters: Mapping[str, Any]) -> bytes:
    return pack_json({"prompt": prompt, "parameters": dict(parameters)})


def unpack(payload: bytes) -> tuple[str, dict[str, Any]]:
    """Prompt hash and parameters. ValueError, KeyError or TypeError when `pack` did not make the payload."""
    data = unpack_json(payload)
    return str(data["prompt"]), dict(data["parameters"])


def are_valid(parameters: Mapping[str, Any], *, blocks: int) -> bool:
    """Checks what vLLM does not: a wrong type or number of blocks would raise in its step and kill the engine."""
    groups = parameters["remote_block_ids"]
    return (
        all(isinstance(parameters[name], str) for name in ("remote_engine_id", "remote_request_id", "remote_host"))
        and all(is_count(parameters[name], 1) for name in ("remote_port", "tp_size"))
        and all(is_count(parameters.get(name, 1), 1) for name in ("dcp_size", "pp_size"))
        and all(is_count(block, 0) for group in groups for block in group)
        and is_valid_hold(parameters.get("hold"), int(parameters["tp_size"]))
        # A group with full attention has all blocks; a group with a window has fewer.
        and max((len(group) for group in groups), default=0) == blocks
    )


def is_valid_hold(hold: Any, ranks: int) -> bool:
    """Returns True for a well-formed hold, or none: a handle without a hold is not pulled."""
    return hold is None or (
        all(is_count(hold[name], 0) for name in ("index", "number"))
        and len(hold["addresses"]) >= ranks
        and all(is_count(address, 1) for address in hold["addresses"])
    )


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
