"""SGLang's requests from the adapter's messages."""

from array import array
from typing import Any

from kvmesh.engines.sglang.messages import Call, Cancel, Submit
from kvmesh.kv.blocks import unpack_tokens

CALL_MARK = "call-"
RESET_WAIT_S = 0.2
"""SGLang counts a request that has just ended as running until its next step."""


def request_id(number: int) -> str:
    """SGLang's id of a leg. All have the same length: SGLang aborts every request whose id *begins* with the given one."""
    return f"{number:016x}"


def leg_number(rid: str) -> int:
    """Returns the inverse of `request_id`."""
    return int(rid, 16)


def call_id(rid: str) -> int:
    return int(rid.removeprefix(CALL_MARK))


class Requests:
    """Makes requests for one model. ValueError from SGLang's own checks."""

    def __init__(self, *, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size

    def submit(self, message: Submit) -> Any:
        from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(**message.sampling)
        sampling.normalize(self._tokenizer)
        sampling.verify(self._vocabulary_size)
        common: dict[str, Any] = {
            "rid": request_id(message.number),
            "input_text": "",
            "input_ids": array("q", unpack_tokens(message.token_ids)),
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": sampling,
            "lora_id": message.adapter_id or None,
            "lora_name": message.adapter or None,
            "priority": message.priority,
        }
        if message.is_embedding:
            return TokenizedEmbeddingReqInput(**common, dimensions=message.dimensions)
        meeting = message.meeting
        wants_prompt = message.prompt_logprobs is not None
        return TokenizedGenerateReqInput(
            **common,
            input_embeds=None,
            return_logprob=message.logprobs is not None or wants_prompt,
            logprob_start_len=0 if wants_prompt else -1,
            top_logprobs_num=max(message.logprobs or 0, message.prompt_logprobs or 0),
            token_ids_logprob=None,
            stream=True,
            cache_salt=message.cache_salt or None,
            bootstrap_host=meeting.host if meeting else None,
            bootstrap_port=meeting.port if meeting else None,
            bootstrap_room=meeting.room if meeting else None,
            disagg_prefill_dp_rank=None,
        )


def abort(message: Cancel) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=request_id(message.number))


def operation(message: Call) -> Any:
    """Returns a control request whose answer carries the call's id."""
    from sglang.srt.managers.io_struct import (
        FlushCacheReqInput,
        LoadLoRAAdapterReqInput,
        PdRoleSwitchReqInput,
        UnloadLoRAAdapterReqInput,
    )

    rid = f"{CALL_MARK}{message.call_id}"
    if message.operation == "reset_cache":
        return FlushCacheReqInput(rid=rid, timeout_s=RESET_WAIT_S)
    if message.operation == "set_role":
        return PdRoleSwitchReqInput(rid=rid, new_role=message.arguments[0])
    name, adapter_id, path = message.arguments
    if message.operation == "load_adapter":
        return LoadLoRAAdapterReqInput(rid=rid, lora_name=name, lora_id=adapter_id, lora_path=path, pinned=False)
    return UnloadLoRAAdapterReqInput(rid=rid, lora_name=name, lora_id=adapter_id)
