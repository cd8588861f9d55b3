"""Whole meshes with real SGLang engines, as `kvmesh up` starts them, against one engine that does everything."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, PREFILL
from tests.chaos.rendezvous import BURST, FLOAT32, VOCABULARY, Case, Rendezvous, rendezvous
from tests.parts import require_part

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sglang, pytest.mark.timeout(400)]
PROMPTS = [
    [Random(length).randrange(10, VOCABULARY) for _ in range(10 + round(790 * length / 49))] for length in range(50)
]
"""50 prompts of 10 to 800 tokens without a common beginning."""
AT_ONCE = 16
KILLS = (Case(PREFILL, "waiting_requests", True), Case(DECODE, "receiving_requests", True))
STOPS = (Case(PREFILL, "waiting_requests", False), Case(DECODE, "preallocating_requests", False))


async def answers(mesh: Rendezvous) -> list[list[int]]:
    """Of all prompts, AT_ONCE at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return await mesh.ask(prompt)

    return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of one engine alone, one prompt after the other."""
    require_part("sglang")
    argv = ("--prefill", "0", "--decode", "1", f"--engine-args={FLOAT32}", "--decode-args=")
    async with rendezvous(tmp_path_factory.mktemp("alone"), *argv, workers=1) as alone:
        found = [await alone.ask(prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2, "the model's answers hardly differ"
    return found


async def test_mooncake_with_retraction(expected: list[list[int]], tmp_path: Path) -> None:
    """A pair over `mooncake_tcp` whose decode engine takes back blocks every few steps gives the same tokens."""
    require_part("ibverbs")
    argv = (
        *("--prefill", "1", "--decode", "1", "--decode-args="),
        f"--engine-args={FLOAT32} --sglang-transfer-backend mooncake_tcp",
    )
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    async with rendezvous(tmp_path, *argv, workers=2, env=retracting) as pair:
        assert await answers(pair) == expected
        (decode,) = await pair.instances(DECODE)
        assert await pair.total(decode, "preempted_requests_total") > 0
        await pair.wait_whole()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rendezvous]:
    """Two prefill workers, which compute prompts in chunks of 128 tokens, and two decode workers over NIXL."""
    async with rendezvous(tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def test_two_pairs_answer_as_one_engine(mesh: Rendezvous, expected: list[list[int]]) -> None:
    """Prompts of up to seven chunks, 16 at once, more than a decode engine has blocks for."""
    assert await answers(mesh) == expected
    await mesh.wait_whole()
    for instance in await mesh.instances(DECODE):
        assert await mesh.total(instance, "prompt_tokens_total") == 0
        assert await mesh.total(instance, "transferred_tokens_total") > 0


@pytest.mark.parametrize("case", STOPS, ids=lambda case: case.name)
async def test_an_engine_process_that_is_stopped(mesh: Rendezvous, case: Case) -> None:
    """Its worker is silent then, so its requests move to the other one. SGLang itself would wait for minutes here."""
    outcome = await mesh.run(case)
    assert outcome.counts["right"] == BURST, outcome.counts


async def test_an_engine_process_that_is_killed(mesh: Rendezvous) -> None:
    """Of each role one dies under load: every answer is right, and no block stays in use."""
    for case in KILLS:
        outcome = await mesh.run(case, waits_for_restart=case is not KILLS[-1])
        assert outcome.counts["right"] == BURST, outcome.counts
