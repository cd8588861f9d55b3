"""The mesh on eight hosts for the tests of faults, with either engine."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration import vllm_model
from tests.integration.test_mesh_vllm import answers_alone
from tests.machines.mesh import Machines, machines
from tests.machines.traffic import MODEL, PROMPT_TOKENS, KnownQuestions, Questions, SimulatedQuestions
from tests.parts import require_part

HOSTS = ["router", "prefill-1", "prefill-2", "decode-1", "decode-2", "frontend-1", "frontend-2"]
SIMULATED = ("--engine", "simulated", "--simulated-kv-transport-delay-s", "0")
VLLM = ("--engine", "vllm", "--vllm-dtype", "float32", "--vllm-kv-cache-bytes", str(16 << 20))
VLLM_PROMPTS = 100
VLLM_READY_S = 400.0
VLLM_PACE_S = 1.0
"""Four engines share the machine's cores with all other processes."""


@asynccontextmanager
async def simulated_mesh(directory: Path) -> AsyncIterator[tuple[Machines, Questions]]:
    async with machines(directory, HOSTS, model=MODEL, engine_argv=SIMULATED) as mesh:
        yield mesh, SimulatedQuestions()


@asynccontextmanager
async def vllm_mesh(directory: Path) -> AsyncIterator[tuple[Machines, Questions]]:
    """The policy ignores costs, so that every prompt is handed off."""
    require_part("vllm")
    model = vllm_model.add_tokenizer(vllm_model.make_model(directory / "models" / "tiny"))
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(VLLM_PROMPTS)]
    alone = asyncio.create_task(answers_alone(prompts, model=model))
    argv = ("--policy", "round_robin")
    async with machines(
        directory, HOSTS, model=model, engine_argv=VLLM, router_argv=argv, ready_s=VLLM_READY_S
    ) as mesh:
        yield mesh, KnownQuestions(prompts, await alone, pace_s=VLLM_PACE_S)


MESHES = {"simulated": simulated_mesh, "vllm": vllm_mesh}
