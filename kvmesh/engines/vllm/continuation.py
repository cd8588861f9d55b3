"""Continues answers that another engine began, written against vLLM 0.32.

vLLM's scheduler gets the emitted tokens as the end of the prompt, so that prefix cache, KV connector and budgets treat them like any
prompt. Its sampler gets them as output: penalties count them, `min_tokens` is compared with their number, a seed's generator is advanced
by one draw for each, and the grammar has accepted them. `Continuations` is the scheduler's half. `split_emitted` is the half of the V1
model runner; the V2 runner itself separates prompt and earlier output, as it does for preempted requests.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

EMITTED = "kvmesh_emitted"
"""Name in `SamplingParams.extra_args` of the number of emitted tokens at the end of the prompt."""


class Continuations:
    """Adds requests with emitted tokens to the engine core. Use it on the engine thread only."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._emitted: dict[str, int] = {}
        """By request id, until `forget`."""
        scheduler = core.scheduler
        self._wrap_schedule(scheduler)
        if not scheduler.use_v2_model_runner:
            self._wrap_cached_data(scheduler)

    def add(self, core_request: Any, emitted_token_ids: Sequence[int]) -> None:
        """Adds a request whose prompt ends with the emitted tokens. Its sampling parameters state the limits of the whole answer."""
        request, wave = self._core.preprocess_add_request(core_request)
        emitted = len(emitted_token_ids)
        request.max_tokens -= emitted
        if request.structured_output_request is not None:
            self._advance_grammar(request, list(emitted_token_ids))
        self._emitted[request.request_id] = emitted
        try:
            self._core.add_request(request, wave)
        except BaseException:
            self.forget(request.request_id)
            raise

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._emitted.pop(request_id, None)

    def _advance_grammar(self, request: Any, emitted: list[int]) -> None:
        """Makes the request wait for a grammar that has accepted the emitted tokens. One that does not accept them fails it."""
        structured, manager = request.structured_output_request, self._core.structured_output_manager
        compiled = structured._grammar

        def advanced() -> Any:
            # Compiling was submitted before this, so that it never waits for the thread that runs this.
            grammar = compiled.result() if isinstance(compiled, Future) else compiled
            if not grammar.accept_tokens(request.request_id, emitted):
                raise ValueError("the grammar does not accept the emitted tokens")
            return grammar

        structured.grammar = manager.executor.submit(advanced)

    def _wrap_schedule(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def schedule_and_mark(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            if self._emitted and scheduler.use_v2_model_runner:
                for new in output.scheduled_new_reqs:
                    if emitted := self._emitted.get(new.req_id):
                        # `prefill_token_ids` has them too. Tokens beyond the prompt are output to this runner.
                        new.prompt_token_ids = new.prompt_token_ids[:-emitted]
            return output

        scheduler.schedule = schedule_and_mark

    def _wrap_cached_data(self, scheduler: Any) -> None:
        """The V1 runner drops output beyond the number that the scheduler states, and takes so many tokens after a preemption."""
        make = scheduler._make_cached_request_data

        def make_with_emitted(*arguments: Any, **named: Any) -> Any:
            data = make(*arguments, **named)
            if self._emitted:
                get = self._emitted.get
                data.num_output_tokens = [
                    count + get(request_id, 0)
                    for request_id, count in zip(data.req_ids, data.num_output_tokens, strict=True)
                ]
            return data

        scheduler._make_cached_request_data = make_with_emitted


def split_emitted(runner: Any) -> None:
    """Makes a V1 model runner treat the emitted tokens of a new request as its output. Does nothing to a V2 runner."""
    if not hasattr(runner, "input_batch"):
        return
    batch = runner.input_batch
    add = batch.add_request
    draw = make_draw(runner)

    def add_split(state: Any) -> int:
        extra = state.sampling_params.extra_args if state.sampling_params is not None else None
        emitted = extra.get(EMITTED, 0) if extra else 0
        if emitted and not state.output_token_ids:
            tokens = state.prompt_token_ids
            state.prompt_token_ids, state.output_token_ids = tokens[:-emitted], list(tokens[-emitted:])
            state.num_prompt_tokens = len(state.prompt_token_ids)
            if state.generator is not None:
                for _ in range(emitted):
                    draw(state.generator)
        return int(add(state))

    batch.add_request = add_split


def make_draw(runner: Any) -> Callable[[Any], None]:
    """Returns what vLLM's V1 sampler does with a request's random generator for each token."""
    import torch

    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        return lambda generator: torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
    noise = torch.empty(runner.input_batch.vocab_size, dtype=dtype, device=runner.device)
    return lambda generator: noise.exponential_(generator=generator)
