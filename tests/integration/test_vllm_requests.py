"""Ordinary requests that ended vLLM's CPU engine: helpers compiled on demand, seeds of prompts computed in several steps, and others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.core import Constraint, ConstraintKind, FinishReason, LegTask, SamplingParams
from kvmesh.engines.vllm.registration import VLLM
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import InvalidRequestError, KvLostError
from kvmesh.worker.fork_server import ForkServer
from tests.integration.no_compilers import compiled_files, environment_without_compilers
from tests.integration.test_vllm_engine import connect
from tests.integration.vllm_drive import Drive, Got, greedy, prompt
from tests.integration.vllm_fuzz import NAMES, SHAPES, VALUES, Found, Fuzz, prepare
from tests.integration.vllm_fuzz import start as start_fuzzed
from tests.integration.vllm_model import add_tokenizer, make_adapter, make_model
from tests.integration.vllm_process import RemoteEngine
from tests.parts import require_part
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(300)]
module_fixture = pytest_asyncio.fixture(scope="module", loop_scope="module")
Make = Callable[..., Awaitable[Drive]]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
CONSTRAINTS = (
    Constraint(kind=ConstraintKind.CHOICE, options=("yes", "no")),
    Constraint(kind=ConstraintKind.REGEX, text="[a-c]{3}"),
    Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"type": "string", "maxLength": 3}'),
    Constraint(kind=ConstraintKind.GRAMMAR, text='root ::= "a" | "b"'),
)


FUZZ_SEED = 20
SINGLES = sum(map(len, VALUES.values())) + sum(map(len, SHAPES.values()))
PAIRS = len(NAMES) * (len(NAMES) - 1) // 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_model(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def compiler_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which compilers of every kind would leave files."""
    return tmp_path_factory.mktemp("workshop")


@module_fixture
async def server(compiler_folder: Path) -> AsyncIterator[ForkServer]:
    """Engines without a compiler on PATH."""
    require_part("vllm")
    require_part("nixl")
    server = await ForkServer.start(VLLM.preload, env=environment_without_compilers(compiler_folder))
    yield server
    await server.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def make(server: ForkServer, model: Path, tmp_path: Path) -> AsyncIterator[Make]:
    drives: list[Drive] = []

    async def start(role: str, **more: Any) -> Drive:
        values = {"model": str(model), "role": role, "dtype": "float32", "kv_cache_bytes": 16 << 20, **more}
        drives.append(Drive(RemoteEngine(server, VllmSettings(**values), tmp_path)))
        return await drives[-1].start()

    yield start
    await asyncio.gather(*(drive.aclose() for drive in drives))


def sampled(**more: Any) -> SamplingParams:
    return replace(SAMPLED, **more)


async def test_no_request_compiles(make: Make, compiler_folder: Path, tmp_path: Path) -> None:
    """Without a compiler on PATH every kind of request is answered, and nothing is compiled."""
    engine = await make("decode", enable_lora=True, step_tokens_max=128, json_whitespace=False)
    await engine.engine.load_adapter("a", str(make_adapter(tmp_path / "a")))
    kinds = [
        sampled(prompt_logprobs=1),
        sampled(prompt_logprobs=0, logprobs=0),
        sampled(logprobs=20, top_k=3, top_p=0.5, min_p=0.1),
        sampled(presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.2),
        sampled(logit_bias=((5, 10.0),), min_tokens=2, stop_token_ids=(7,), ignore_eos=False),
        *(sampled(constraint=constraint, ignore_eos=False) for constraint in CONSTRAINTS),
    ]
    generations = [greedy(300, seed=seed, sampling=sampling) for seed, sampling in enumerate(kinds)]
    generations += [greedy(300, seed=50, adapter="a"), greedy(1, seed=51, sampling=kinds[0], adapter="a")]
    for got in await asyncio.gather(*map(engine.decode, generations)):
        assert got.finish is not None
        assert got.finish.reason in (FinishReason.LENGTH, FinishReason.STOP), got.finish
    pooling = await make("decode", runner="pooling", engine_arguments={"convert": "embed"}, has_kv_transfer=False)
    vector = await pooling.result(pooling.submit(LegTask.EMBED, greedy(100)))
    assert vector.finish is not None
    assert vector.finish.embedding
    assert compiled_files(compiler_folder) == []


async def test_a_seeded_answer_does_not_depend_on_chunks(make: Make) -> None:
    """A seeded request whose prompt takes many steps gets the same answer as one whose prompt takes one step, alone and among others, with
    prompt log-probabilities, penalties and a constraint. vLLM's own engine dies of it."""
    whole, chunked = await make("decode", step_tokens_max=2048), await make("decode", step_tokens_max=64)
    kinds = [
        sampled(),
        sampled(prompt_logprobs=1, logprobs=1),
        sampled(top_p=0.9, presence_penalty=1.0),
        sampled(constraint=CONSTRAINTS[1], ignore_eos=False),
    ]
    generations = [greedy(500, seed=seed, sampling=kinds[seed % len(kinds)]) for seed in range(16)]
    generations = [replace(each, sampling=replace(each.sampling, seed=seed)) for seed, each in enumerate(generations)]
    expected = [tokens_of(await whole.decode(generation)) for generation in generations]
    assert len({tuple(tokens) for tokens in expected}) > 8, "different seeds must give different answers"
    assert tokens_of(await chunked.decode(generations[0])) == expected[0]
    # Others decode meanwhile, and their generators advance with every step.
    assert list(map(tokens_of, await asyncio.gather(*map(chunked.decode, generations)))) == expected


async def test_seeded_requests_of_a_dead_prefill_worker_are_recomputed(make: Make) -> None:
    """The prefill process dies with the KV of seeded prompts. The decode engine computes them in chunks while it decodes others, gives the
    same tokens as an engine that computes each prompt in one step, and continues to work."""
    prefill, decode, whole = await asyncio.gather(
        make("prefill"), make("decode", step_tokens_max=64, pull_timeout_s=2.0), make("decode", step_tokens_max=2048)
    )
    generations = [greedy(500, seed=seed, sampling=sampled(seed=seed)) for seed in range(6)]
    expected = [tokens_of(await whole.decode(generation)) for generation in generations]
    handles = [await prefill.prefill(generation) for generation in generations[:4]]
    await prefill.remote.kill()
    lost = [decode.decode(generation, handle) for generation, handle in zip(generations[:4], handles, strict=True)]
    got = await asyncio.gather(*lost, *map(decode.decode, generations[4:]))
    assert list(map(tokens_of, got)) == expected
    assert [each.finish is not None and each.finish.was_recomputed for each in got] == [True] * 4 + [False] * 2
    assert tokens_of(await decode.decode(generations[0])) == expected[0]


async def test_adapters_in_every_slot_do_not_affect_the_base_model(make: Make, tmp_path: Path) -> None:
    """When adapters fill all of vLLM's slots, requests without an adapter still use the base model, alone and among others, and each
    adapter's requests use that adapter. vLLM's CPU engine would apply the last slot's adapter to them."""
    engine = await make("decode", enable_lora=True, adapters_running_max=2)
    base = greedy(40, seed=1)
    expected = {"": tokens_of(await engine.decode(base))}
    for index, name in enumerate("ab"):
        await engine.engine.load_adapter(name, str(make_adapter(tmp_path / name, seed=index)))
        expected[name] = tokens_of(await engine.decode(replace(base, adapter=name)))
    assert len(set(map(tuple, expected.values()))) == 3, "each adapter must change the answer"
    assert tokens_of(await engine.decode(base)) == expected[""]
    names = ["", "a", "b", ""] * 3
    together = await asyncio.gather(*(engine.decode(replace(base, adapter=name)) for name in names))
    assert [tokens_of(got) for got in together] == [expected[name] for name in names]


async def test_prompts_are_scored_as_their_tokens_were_generated(make: Make, tmp_path: Path) -> None:
    """When an answer is scored as a prompt, its log-probabilities are those of its generation, with and without adapters, in chunks and among
    others. vLLM's CPU engine dies if adapters are enabled."""
    engine = await make("decode", enable_lora=True, adapters_running_max=2, step_tokens_max=64)
    names = ["", "a", "b"]
    for index, name in enumerate(names[1:]):
        await engine.engine.load_adapter(name, str(make_adapter(tmp_path / name, seed=index)))
    asked = replace(greedy(100, seed=1).sampling, logprobs=0)
    answers = [await engine.decode(greedy(100, seed=1, sampling=asked, adapter=name)) for name in names]
    score = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [
        replace(greedy(100, seed=1, sampling=score, adapter=name), token_ids=[*prompt(100, 1), *answer.tokens])
        for name, answer in zip(names, answers, strict=True)
    ]
    scores = await asyncio.gather(*(engine.decode(each) for each in prompts * 2))
    for answer, scored in zip(answers * 2, scores, strict=True):
        expected = [each.logprob for each in answer.logprobs]
        assert [each.logprob for each in scored.prompt_logprobs[-len(expected) :]] == pytest.approx(expected, abs=1e-3)


async def test_a_time_budget_splits_prompts(make: Make) -> None:
    """With a time budget that no step can meet, prompts are computed in parts. Every answer equals that of a prompt computed at once."""
    whole, parts = await make("decode", step_budget_s=0.0), await make("decode", step_budget_s=1e-5)
    generations = [
        greedy(400, seed=1),
        greedy(400, seed=2, sampling=sampled(prompt_logprobs=1)),
        greedy(400, seed=3, sampling=sampled(constraint=CONSTRAINTS[1], ignore_eos=False)),
    ]
    for number, generation in enumerate(generations):
        before = [engine.engine.load().step for engine in (whole, parts)]
        expected, got = await whole.decode(generation), await parts.decode(generation)
        steps = [engine.engine.load().step - start for engine, start in zip((whole, parts), before, strict=True)]
        assert tokens_of(got) == tokens_of(expected)
        # The first part has 64 tokens, and each later one at most twice as many as the one before.
        assert number or steps[1] - steps[0] >= 2
        assert [each.logprob for each in got.prompt_logprobs] == pytest.approx(
            [each.logprob for each in expected.prompt_logprobs], abs=1e-3
        )


async def test_a_cancel_is_answered_before_the_next_step(make: Make) -> None:
    """While others decode, the finish of a cancelled leg does not wait for their next tokens."""
    engine = await make("decode")
    others = [engine.submit(LegTask.GENERATE, greedy(100, seed=seed, tokens=1900)) for seed in range(4)]
    for _ in range(10):
        key = engine.submit(LegTask.GENERATE, greedy(100, seed=9, tokens=1900))
        await engine.got[key].first.wait()
        engine.engine.cancel_nowait(key)
        await engine.result(key)
    cancelled = [
        output
        for output in engine.outputs
        if any(finish.reason is FinishReason.CANCELLED for finish in output.finishes)
    ]
    assert len(cancelled) == 10
    assert all(not output.keys for output in cancelled)
    for key in others:
        engine.engine.cancel_nowait(key)


async def test_adapters_of_one_name_are_distinguished_by_content(make: Make, tmp_path: Path) -> None:
    """An engine does not read KV of an adapter if its own adapter of that name has other weights. The next adapter with the same name and
    path does not find the old one's blocks in the cache. With equal weights from any path, KV is handed off."""
    options = {"enable_lora": True, "pull_timeout_s": 25.0, "lease_s": 2 * PATIENCE_S}
    prefill, decode = await asyncio.gather(make("prefill", **options), make("decode", **options))
    await connect(prefill, decode)
    source = make_adapter(tmp_path / "old", seed=1)
    await prefill.engine.load_adapter("a", str(make_adapter(tmp_path / "new", seed=2)))
    await decode.engine.load_adapter("a", str(source))
    generation = greedy(100, seed=31, adapter="a")
    expected = tokens_of(await prefill.decode(generation))
    handle = await prefill.prefill(generation)
    with pytest.raises(KvLostError):
        decode.submit(LegTask.GENERATE, generation, handle=handle)
    assert tokens_of(await decode.decode(generation)) != expected
    make_adapter(source, seed=2)
    with pytest.raises(InvalidRequestError, match="unload it first"):
        await decode.engine.load_adapter("a", str(source))
    await decode.engine.unload_adapter("a")
    await decode.engine.load_adapter("a", str(source))
    assert tokens_of(await decode.decode(generation)) == expected
    assert await decode.engine.reset_cache()
    got = await decode.decode(generation, handle)
    assert tokens_of(got) == expected
    assert got.finish is not None
    assert got.finish.usage.transferred_tokens == 100


@module_fixture
async def fuzzed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Drive]]:
    """A prefill and a decode engine."""
    folder = tmp_path_factory.mktemp("engines")
    model = prepare(folder)
    drives = await asyncio.gather(*(start_fuzzed(server, folder, role, model) for role in ("prefill", "decode")))
    yield drives
    await asyncio.gather(*(drive.aclose() for drive in drives))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("has_prefill", "requests"), [(False, SINGLES), (True, SINGLES + PAIRS)], ids=["single", "split"]
)
async def test_no_request_ends_an_engine(fuzzed: list[Drive], has_prefill: bool, requests: int) -> None:
    """A bounded run of `tests.integration.vllm_fuzz`: every request is answered or refused, none ends an engine, and a reference prompt gets its
    tokens after each batch.

    One engine gets each value of each sampling parameter. A pair also gets values of each two parameters; a quarter of its requests go to the
    decode engine without a handle.
    """
    prefill, decode = fuzzed
    fuzz = Fuzz(prefill if has_prefill else None, decode, FUZZ_SEED)
    found = Found()
    while found.requests < requests and not found.broken:
        found = await fuzz.run(1)
    assert not found.broken, f"after {found.requests} requests of seed {FUZZ_SEED}: {found.broken}"
    assert found.outcomes["length"] > found.requests / 3, "too few requests were answered"


def tokens_of(got: Got) -> list[int]:
    assert got.finish is not None
    assert got.finish.error is None
    return got.tokens
