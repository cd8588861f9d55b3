"""One leg inside the TensorRT-LLM engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmesh.core import LegTask, Usage
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.trtllm.sampling import CONTEXT, GENERATION, Stopping

if TYPE_CHECKING:
    from tensorrt_llm.disaggregated_params import DisaggregatedParams
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.llmapi.llm import RequestOutput


@dataclass(slots=True, eq=False, kw_only=True)
class TrtllmLeg:
    """A leg's state. The engine gives each attempt a number of its own, so `result` is what maps the mesh's key to it.

    `params` are those of the present attempt's handoff; None: the engine computes the prompt and generates.
    `deadline` cancels a generation phase that gets no KV; `reader` reads the engine's results.
    `entry_step` is the number of the last step before the one with the leg's newest tokens.
    """

    request: EngineRequest
    tokens: Sequence[int]
    seed: int
    prompt: str
    rules: Stopping
    params: "DisaggregatedParams | None" = None
    adapter: "LoRARequest | None" = None
    was_recomputed: bool = False
    is_cancelled: bool = False
    submitted_at_s: float = 0.0
    queue_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    entry_step: int = -1
    result: "RequestOutput | None" = None
    reader: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def phase(self) -> str:
        """The handoff's phase; empty: none."""
        return (self.params.request_type or "") if self.params is not None else ""

    @property
    def is_prefill(self) -> bool:
        return self.request.task is LegTask.PREFILL

    @property
    def reads_handle(self) -> bool:
        return self.phase == GENERATION

    @property
    def is_context(self) -> bool:
        return self.phase == CONTEXT

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.generation.token_ids),
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
        )
