"""See the package."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorrt_llm._engine import Executor, Request
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import IterationResult
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.request_output import RequestOutput
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

BLOCKS = 512
_NUMBERS = itertools.count(1)


class LLM:
    """See the stub."""

    def __init__(
        self,
        model: str,
        tokenizer: Any | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        cache = kwargs["kv_cache_config"]
        transceiver = kwargs.get("cache_transceiver_config") or {}
        self._has_tokenizer = not skip_tokenizer_init
        self._arguments = kwargs
        self._context = kwargs.get("max_seq_len") or config["max_position_embeddings"]
        self._executor: Executor | None = Executor(
            blocks=cache.get("max_tokens", BLOCKS * cache["tokens_per_block"]) // cache["tokens_per_block"],
            size=cache["tokens_per_block"],
            batch=kwargs["max_batch_size"],
            events_max=cache.get("event_buffer_max_size", 0),
            vocabulary=config["vocab_size"],
            timeout_s=transceiver.get("kv_transfer_timeout_ms", 60000) / 1000,
        )

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        return {"ctx_info_endpoint": [self._running().endpoint]}

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any | None = None,
        streaming: bool = False,
        kv_cache_retention_config: Any | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any | None = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: Any | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        executor, params = self._running(), sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not 0 <= priority <= 1:
            raise ValueError("priority must be a float in [0.0, 1.0]")
        if len(inputs) >= self._context:
            raise RequestError("the prompt is too long")
        if params.guided_decoding is not None and not self._has_tokenizer:
            raise ValueError("guided decoding needs a tokenizer")
        if disaggregated_params is not None and "cache_transceiver_config" not in self._arguments:
            raise ValueError("cache_transceiver_config is not set")
        if disaggregated_params is not None and disaggregated_params.request_type == "context_only":
            params.max_tokens = 1
        executor.log.append({"params": params, "priority": priority, "scheduling": scheduling_params})
        result = RequestOutput(next(_NUMBERS), executor.abort)
        adapter = str(lora_request.lora_int_id) if lora_request is not None else ""
        executor.submit(
            Request(
                number=result.request_id,
                tokens=list(inputs),
                params=params,
                salt=f"{adapter}/{cache_salt or ''}",
                priority=priority,
                handoff=disaggregated_params,
                result=result,
            )
        )
        return result

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._running().stats, timeout or 0)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._running().cache.events, timeout or 0)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        cache = self._running().cache
        return {"maxNumBlocks": cache.total, "tokensPerBlock": cache.size, "maxNumTokens": cache.total * cache.size}

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.is_healthy

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = None

    def _running(self) -> Executor:
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        return self._executor
