"""Fixes for vLLM's CPU engine: no compiler at run time, correct seeds with chunked prompts, separate adapters.

`prepare_runner` replaces methods of a V1 model runner instance of vLLM 0.32.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

LORA_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def forbid_compiling() -> None:
    """Makes `torch.compile` return its argument. Call it before vLLM's sampler is imported.

    vLLM compiles some helpers of its sampler at their first use, even with `enforce_eager`. The first request with prompt
    log-probabilities would wait for a C++ compiler (44 s), or kill the engine where there is no compiler.
    """
    importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]


def allow_model_compiling(is_allowed: bool) -> None:
    """Decides for the model itself, which is compiled at the start. Helpers that are already imported stay uncompiled."""
    if is_allowed:
        importlib.import_module("torch._dynamo.config").disable = False  # type: ignore[attr-defined]
    else:
        # For ranks that are separate processes.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def prepare_runner(runner: Any) -> None:
    """Fixes a model runner for requests that would kill vLLM's CPU engine or get a wrong answer."""
    if not hasattr(runner, "discard_request_mask"):
        return  # The V2 model runner, which samples without generators of torch.
    keep_seeds(runner)
    if runner.lora_config is not None:
        separate_adapters()
        score_prompts_with_adapters(runner)


def keep_seeds(runner: Any) -> None:
    """Preserves the random generators of seeded requests whose prompt is computed in several steps.

    Each step samples a token for every request and discards the tokens of unfinished prompts. vLLM rewinds their generators by
    `Generator.set_offset`, which raises for CPU generators and kills the engine. Here the generators of such requests are removed for
    the step: the discarded sample comes from the global generator, and the request's own does not advance.
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
    """Stops adapters from affecting requests without an adapter. Idempotent.

    vLLM marks a request without an adapter by the index -1. Its CPU operations use -1 as an index, which selects the last slot: once
    all slots hold adapters, the base model answers with the last one's weights. Here the inputs of such rows are zero.
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
    def adapt(inputs: Any, weights: Any, output: Any, indices: Any, *more: Any, **named: Any) -> None:  # noqa: PLR0917  # vLLM calls it.
        if len(indices) == len(inputs):
            inputs = inputs.masked_fill((indices < 0).unsqueeze(-1), 0)
        operation(inputs, weights, output, indices, *more, **named)

    return adapt


def score_prompts_with_adapters(runner: Any) -> None:
    """Computes prompt log-probabilities in an engine with adapters.

    vLLM maps the adapters of the output layer by the rows that it samples. Prompt logits have another number of rows, which kills the
    CPU engine. Here all rows of one prompt use that prompt's adapter.
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


def add_prompt_logits(  # noqa: PLR0917  # vLLM calls it.
    wrapper: Any, hidden_states: Any, logits: Any, rows: Any, lora_a: Any, lora_b: Any, scale: float, **_: Any
) -> None:
    """Adds an adapter's contribution to the logits of consecutive `rows` of `hidden_states`, which belong to one prompt."""
    first = (rows.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
    slot = int(wrapper._token_lora_indices[first])
    if slot >= 0:
        inner = scale * (rows.float() @ lora_a[slot, 0].float().T)
        share = inner @ lora_b[slot, 0].float().T
        width = min(share.shape[1], logits.shape[1])
        logits[:, :width] += share[:, :width]
