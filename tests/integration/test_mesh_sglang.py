"""Whole meshes with real SGLang engines, as `kvmesh up` starts them, compared with one engine that computes everything."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, PREFILL
from tests.chaos.rendezvous import BURST, FLOAT32, VOCABULARY, Case, Rendezvous, rendezvous
from tests.integration.test_api_vllm import MESSAGES, TOOLS, WEATHER
from tests.parts import require_part
from tests.security.sglang_channels import check_expensive_grammars, check_listeners

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sglang, pytest.mark.timeout(400)]
PROMPTS = [
    [Random(length).randrange(10, VOCABULARY) for _ in range(10 + round(790 * length / 49))] for length in range(50)
]
"""50 prompts of 10 to 800 tokens without a common prefix."""
SCORED = PROMPTS[20]
AT_ONCE = 16
KILLS = (Case(PREFILL, "waiting_requests", True), Case(DECODE, "receiving_requests", True))
STOPS = (Case(PREFILL, "waiting_requests", False), Case(DECODE, "preallocating_requests", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The answers of one engine alone."""

    tokens: list[list[int]]
    """Answers to PROMPTS."""
    scores: list[float]
    """Log-probabilities of the tokens of SCORED from the second on."""


async def scores(mesh: Rendezvous, max_tokens: int) -> list[float]:
    """Returns the log-probabilities of the tokens of SCORED, as the completions API gives them."""
    body = {"model": "demo", "prompt": SCORED, "max_tokens": max_tokens, "temperature": 0, "prompt_logprobs": 1}
    async with mesh.session.post(f"{mesh.mesh.url}/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None and answer["usage"]["completion_tokens"] > 0
    return [entries[str(token)]["logprob"] for token, entries in zip(SCORED[1:], others, strict=True)]


async def answers(mesh: Rendezvous) -> list[list[int]]:
    """Returns the answers to all prompts, with AT_ONCE requests in flight."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return await mesh.ask(prompt)

    return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Answers of one engine alone, one prompt after the other."""
    require_part("sglang")
    argv = ("--prefill", "0", "--decode", "1", f"--engine-args={FLOAT32}", "--decode-args=")
    async with rendezvous(tmp_path_factory.mktemp("alone"), *argv, workers=1) as alone:
        found = [await alone.ask(prompt) for prompt in PROMPTS]
        scored = await scores(alone, 1)
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2, "the model's answers hardly differ"
    return Expected(tokens=found, scores=scored)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rendezvous]:
    """Two prefill workers, which compute prompts in chunks of 128 tokens, and two decode workers over NIXL."""
    async with rendezvous(tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def test_two_pairs_answer_as_one_engine(mesh: Rendezvous, expected: Expected) -> None:
    """Prompts of up to seven chunks get the same answers as from one engine. 16 requests run concurrently, more than a decode engine has
    blocks for."""
    assert await answers(mesh) == expected.tokens
    await mesh.wait_whole()
    for instance in await mesh.instances(DECODE):
        assert await mesh.total(instance, "prompt_tokens_total") == 0
        assert await mesh.total(instance, "transferred_tokens_total") > 0


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_the_prefill_engine_scores_the_prompt(mesh: Rendezvous, expected: Expected, max_tokens: int) -> None:
    """A prompt of several chunks gets the same log-probabilities, with a handoff and without (a single token)."""
    assert await scores(mesh, max_tokens) == pytest.approx(expected.scores, abs=1e-3)


async def test_the_openai_client(mesh: Rendezvous) -> None:
    """Structured output, forced tools, log-probabilities and streams work with separate prefill and decode workers."""
    ask: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{mesh.mesh.url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        options = {"extra_body": {"structured_outputs": {"choice": ["red", "green"]}}}
        chosen = await create(**ask, max_tokens=20, **options)
        assert chosen.choices[0].message.content in ("red", "green") and chosen.choices[0].finish_reason == "stop"
        form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
        answer = await create(**ask, max_tokens=200, response_format=form)
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), WEATHER)
        tools: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        async with client.chat.completions.stream(**ask, max_tokens=200, **tools) as events:
            (call,) = (await events.get_final_completion()).choices[0].message.tool_calls or ()
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        whole = await create(**ask, max_tokens=12, logprobs=True, top_logprobs=3)
        parts = [part async for part in await create(**ask, max_tokens=12, logprobs=True, top_logprobs=3, stream=True)]
        assert whole.choices[0].logprobs is not None
        entries = whole.choices[0].logprobs.content or []
        streamed = [
            entry for part in parts for each in part.choices if each.logprobs for entry in each.logprobs.content or ()
        ]
        assert [entry.token for entry in entries] == [entry.token for entry in streamed] and len(entries) > 1
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        assert (
            "".join(each.delta.content or "" for part in parts for each in part.choices)
            == whole.choices[0].message.content
        )
        with pytest.raises(openai.BadRequestError):
            await create(**ask, max_tokens=8, extra_body={"structured_outputs": {"regex": "("}})


async def test_everything_listens_on_loopback(mesh: Rendezvous) -> None:
    """With the flags that `kvmesh up` gives workers, no channel of SGLang is reachable from the network."""
    await check_listeners(mesh)


async def test_an_expensive_grammar_does_not_silence_a_worker(mesh: Rendezvous) -> None:
    """A schema that is too large is refused, and large ones are compiled while other requests continue."""
    await check_expensive_grammars(mesh)


@pytest.mark.parametrize("case", STOPS, ids=lambda case: case.name)
async def test_an_engine_process_that_is_stopped(mesh: Rendezvous, case: Case) -> None:
    """The worker becomes silent, so its requests move to another worker. SGLang itself would wait for minutes."""
    outcome = await mesh.run(case)
    assert outcome.counts["right"] == BURST, outcome.counts


@pytest.mark.proves("migration", engine="sglang")
async def test_an_engine_process_that_is_killed(mesh: Rendezvous) -> None:
    """One engine of each role is killed under load. Every answer is right, and no block stays in use."""
    for dead, case in enumerate(KILLS, 1):
        # The test does not wait for restarted workers.
        outcome = await mesh.run(case, workers=mesh.workers - dead)
        assert outcome.counts["right"] == BURST, outcome.counts
