"""Repairs of vLLM's CPU engine: no compiler at run time, seeds that survive chunked prompts, adapters that stay separate.

`prepare_runner` is written against the V1 model runner of vLLM 0.32 and replaces methods of the instance it gets.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

LORA_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def forbid_compiling() -> None:
    """Makes `torch.compile` return plain functions. Call it before vLLM's sampler is imported.

    vLLM compiles some helpers of its sampler at their first use, whatever `enforce_eager` says. The first request with prompt
    log-probabilities then waits for a C++ compiler (44 s), or ends the engine where there is none.
    """
    importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]


def allow_model_compiling(is_allowed: bool) -> None:
    """Decides for the model itself, which is compiled at the start. Helpers that are imported already stay plain."""
    if is_allowed:
        importlib.import_module("torch._dynamo.config").disable = False  # type: ignore[attr-defined]
    else:
        # For ranks in processes of their own.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def prepare_runner(runner: Any) -> None:
    """Prepares a model runner for requests that end vLLM's CPU engine or that it answers wrongly."""
    if not hasattr(runner, "discard_request_mask"):
        return  # The V2 model runner, which samples without generators of torch.
    keep_seeds(runner)
    if runner.lora_config is not None:
        separate_adapters()
        score_prompts_with_adapters(runner)


def keep_seeds(runner: Any) -> None:
    """Keeps the seeds of requests whose prompt is computed in several steps.

    Each step samples a token for every request and discards those of unfinished prompts. vLLM takes back a discarded sample by
    `Generator.set_offset`, which raises for CPU generators and ends the engine. Here the generators of such requests take no
    part in the step: the discarded sample comes from the global generator, and the request's own does not advance.
    """
    sample_tokens = runner.sample_tokens

    def sample_without_discarded(*arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        # The sampling metadata holds the same dict. Rows keep their numbers until the next step begins.
        generators = batch.generators
        is_discarded = runner.discard_request_mask.np
        kept = {row: generators.pop(row) for row in list(generators) if row < batch.num_reqs and is_discarded[row]}
        try:
            return sample_tokens(*arguments, **named)
        finally:
            generators.update(kept)

    runner.sample_tokens = sample_without_discarded


def separate_adapters() -> None:
    """Keeps adapters off requests that name none. Idempotent.

    vLLM marks a request without an adapter by the index -1. Its CPU operations use that index as it is, which selects the last
    slot: once all slots hold adapters, the base model answers with the last one's weights. Here such rows count as zero.
    """
    operations = importlib.import_module("vllm.lora.ops.torch_ops.lora_ops")
    wrapper = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
    for name in LORA_OPERATIONS:
        operation = getattr(operations, name)
        if not hasattr(operation, "__wrapped__"):
            operation = _without_unadapted(operation)
        setattr(operations, name, operation)
        setattr(wrapper, name, operation)


def _without_unadapted(operation: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(operation)
    def adapt(inputs: Any, weights: Any, output: Any, indices: Any, *more: Any, **named: Any) -> None:
        if len(indices) == len(inputs):
            inputs = inputs.masked_fill((indices < 0).unsqueeze(-1), 0)
        operation(inputs, weights, output, indices, *more, **named)

    return adapt


def score_prompts_with_adapters(runner: Any) -> None:
    """Scores prompts in an engine with adapters.

    The logits of prompt tokens run through the adapters' part of the output layer, which vLLM maps by the rows it samples: the
    number of rows differs, and the CPU engine ends. Here all rows of one prompt use that prompt's adapter.
    """
    score = runner._get_prompt_logprobs_dict
    wrappers = list(runner.lora_manager._adapter_manager.punica_wrapper_mapping.values())

    def score_prompts(hidden_states: Any, num_scheduled_tokens: Any) -> Any:
        for wrapper in wrappers:
            wrapper.add_lora_logits = functools.partial(add_prompt_logits, wrapper, hidden_states)
        try:
            return score(hidden_states, num_scheduled_tokens)
        finally:
            for wrapper in wrappers:
                del wrapper.add_lora_logits

    runner._get_prompt_logprobs_dict = score_prompts


def add_prompt_logits(
    wrapper: Any, hidden_states: Any, logits: Any, rows: Any, lora_a: Any, lora_b: Any, scale: float, **_: Any
) -> None:
    """Adds one adapter's share to the logits of neighbouring `rows` of `hidden_states`, which belong to one prompt."""
    first = (rows.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
    slot = int(wrapper._token_lora_indices[first])
    if slot >= 0:
        inner = scale * (rows.float() @ lora_a[slot, 0].float().T)
        share = inner @ lora_b[slot, 0].float().T
        width = min(share.shape[1], logits.shape[1])
        logits[:, :width] += share[:, :width]
