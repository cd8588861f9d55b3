"""The replayed worker caches the same blocks as the simulated engine, which follows vLLM, and routers share their predictions."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.replay.routers import make_placer
from kvmesh.core import Generation, LegTask, SamplingParams
from kvmesh.core.whatif import RecordedRequest
from kvmesh.engines.base import EngineFinish, EngineRequest
from kvmesh.engines.simulated.model_card import read_card
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.kv.blocks import block_hashes
from services.planner.sizing.speed import Speed
from services.whatif.engine import EngineShape, Job, ReplayEngine
from services.whatif.mesh import Replay, ReplayShape

BLOCK, BUDGET = 4, 10
COMMON = list(range(1, 41))

PROMPTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=8)
"""For each prompt: tokens of the common prefix, tokens of its own, steps since the previous prompt."""


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS)
@example(prompts=[(38, 1, 0), (38, 2, 1)])  # Admitted in the step that completes the first prompt.
@example(prompts=[(38, 1, 0), (38, 2, 0)])
def test_the_same_tokens_are_cached_as_in_the_simulated_engine(prompts: list[tuple[int, int, int]]) -> None:
    """A prompt finds the blocks of prompts that were admitted before it, in earlier steps or in the same step, also while those still run."""
    tokens = [COMMON[:shared] + [100 + 20 * i + j for j in range(own)] for i, (shared, own, _) in enumerate(prompts)]
    steps = [sum(after for _, _, after in prompts[: i + 1]) for i in range(len(prompts))]
    assert _replayed(tokens, steps) == _simulated(tokens, steps)


def _replayed(prompts: list[list[int]], steps: list[int]) -> list[int]:
    shape = EngineShape(block_tokens=BLOCK, kv_blocks=200, speed=Speed(step_tokens_max=BUDGET))
    engine = ReplayEngine(
        "w", shape, on_prompt=lambda job, now_s: engine.decode(job, now_s), on_done=lambda job, now_s: None
    )
    jobs = []
    for i, prompt in enumerate(prompts):
        trace = RecordedRequest(at_s=0.0, prompt_tokens=len(prompt), output_tokens=1)
        jobs.append(Job(ask_id=i, trace=trace, names=tuple(block_hashes(prompt, BLOCK)), arrived_s=0.0, decode=engine))
    for step in range(200):
        for job, at in zip(jobs, steps, strict=True):
            if at == step:
                engine.submit(job)
        engine.begin_step()
        engine.end_step(0.0)
    assert all(job.done_s >= 0 for job in jobs)
    return [job.cached_tokens for job in jobs]


def _simulated(prompts: list[list[int]], steps: list[int]) -> list[int]:
    made = SimulatedSettings(
        block_size_tokens=BLOCK,
        kv_blocks=200,
        step_tokens_max=BUDGET,
        running_requests_max=8,
        context_tokens_max=64,
        vocabulary_size=500,
    )
    card, tokens = read_card(made)
    scheduler = Scheduler(made, card, tokens, incarnation="i", compatibility_hash="c", has_transport=True)
    finishes: dict[int, EngineFinish] = {}
    for step in range(200):
        for key, (prompt, at) in enumerate(zip(prompts, steps, strict=True)):
            if at == step:
                generation = Generation(model="demo", token_ids=prompt, sampling=SamplingParams(max_tokens=1))
                scheduler.submit(
                    EngineRequest(key=key, leg_id=str(key), task=LegTask.GENERATE, generation=generation), 0.0
                )
        finishes.update({finish.key: finish for finish in scheduler.step(0.0).finishes})
    return [finishes[key].usage.cached_tokens for key in range(len(prompts))]


@pytest.mark.parametrize("routers", [2, 4])
def test_routers_that_share_predictions_compute_hot_prompts_as_rarely_as_one(routers: int) -> None:
    """Eight requests ask for each document of 32 000 tokens within two seconds, before any worker has computed it.

    Without shared predictions, two routers would compute documents 1.7 times as often as one, and four routers three times as often.
    """
    alone, together = _computed(1), _computed(routers)
    assert together <= 1.15 * alone


def _computed(routers: int) -> int:
    """Returns how many requests computed most of their document."""
    generator, trace = Random(1), []
    block = 0
    for document in range(12):
        names = tuple(range(block, block + 62))
        for request_index in range(8):
            own = (1_000_000 + 8 * document + request_index,)
            at_s = 1.6 * document + 2 * generator.random()
            trace.append(RecordedRequest(at_s=at_s, prompt_tokens=63 * 512, output_tokens=50, block_ids=names + own))
        block += 62
    replay = Replay(ReplayShape(prefills=12, decodes=4, routers=routers), lambda replay: make_placer(replay, "kv"))
    replay.run(sorted(trace, key=lambda request: request.at_s), speed=1.0)
    return sum(job.trace.prompt_tokens - job.cached_tokens > 16_000 for job in replay.jobs)
