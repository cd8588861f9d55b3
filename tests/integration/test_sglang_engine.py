"""Tests beyond the conformance suite on real SGLang engines: one that serves alone, and pairs."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession

from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, LegTask, Rendezvous, Role
from kvmesh.engines.base import INTERNAL_SALT
from kvmesh.engines.ranked import RankedEngine
from kvmesh.engines.sglang.engine import SglangEngine
from kvmesh.engines.sglang.host_process import launcher
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.errors import InvalidRequestError, KvLostError, LostError, UnavailableError, UnsupportedError
from kvmesh.kv.blocks import block_hashes
from kvmesh.kv.paths import KvPaths
from tests.conformance.engine_driver import EngineDriver, greedy
from tests.conformance.sglang_case import ForkedHost, forking_launch, open_fork_server
from tests.integration.mesh import command_line, descendants, process_state
from tests.integration.vllm_model import VOCABULARY, add_tokenizer, make_model
from tests.parts import ROOT, require_part
from tests.patience import PATIENCE_S
from tests.servers import adjacent_free_ports, free_ports

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sglang, pytest.mark.timeout(300)]
PULL_S = 25.0
"""On a busy machine a handoff may take longer than the default. The first one includes the set-up of a connection."""
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer","maximum":9,"minimum":0}},"required":["a"]}'


class Engines:
    """Starts engines: forks of one process or, if `is_fork` is False, programs with this process's environment."""

    def __init__(self, stack: AsyncExitStack, folder: Path, python: Path, server: Any) -> None:
        self._stack, self._python, self._server = stack, str(python), server
        self.model = str(add_tokenizer(make_model(folder / "llama")))
        self.log = str(folder / "engines.txt")
        self._random = Random(11)

    async def start(
        self, *, ranks: int = 1, env: dict[str, str] | None = None, is_fork: bool = True, **changes: Any
    ) -> EngineDriver:
        values = {"model": self.model, "dtype": "float32", "kv_cache_bytes": 16 << 20, "pull_timeout_s": PULL_S}
        settings = SglangSettings(**{**values, **changes})
        launch = forking_launch(self._server, self.log, env) if is_fork else launcher(self._python)
        made = [SglangEngine(settings, launch=launch, random=Random(3)) for _ in range(ranks)]
        engine = made[0] if ranks == 1 else RankedEngine(made, KvPaths(pull_timeout_s=settings.pull_timeout_s))
        driver = EngineDriver(engine, PATIENCE_S)
        self._stack.push_async_callback(driver.aclose)
        return await driver.start()

    async def run(self, module: str, log: Path) -> int:
        """Runs a module in a fork. Returns its exit status."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._server.wait(await self._server.spawn(module, log=str(log)))

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(2, VOCABULARY) for _ in range(tokens)]

    def greedy(self, tokens: int, max_tokens: int = 8, **sampling: Any) -> Generation:
        return greedy(self.model, self.prompt(tokens), max_tokens, **sampling)

    def room(self, prefill: EngineDriver) -> Rendezvous:
        host, _, port = prefill.engine.describe().rendezvous_address.rpartition(":")
        return Rendezvous(host=host, port=int(port), room=self._random.getrandbits(63))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    python = require_part("sglang")
    folder = tmp_path_factory.mktemp("sglang")
    async with AsyncExitStack() as stack:
        server = await open_fork_server(stack, python, str(folder / "fork-server.txt"))
        yield Engines(stack, folder, python, server)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(engines: Engines) -> EngineDriver:
    return await engines.start(has_kv_transfer=False, running_requests_max=2)


def text_of(tokens: list[int]) -> str:
    """Returns the text. The tokenizer's ids are code points plus 2."""
    return "".join(chr(token - 2) for token in tokens if token > 1)


def host_of(driver: EngineDriver) -> ForkedHost:
    process = driver.engine._process  # type: ignore[attr-defined]
    assert isinstance(process, ForkedHost)
    return process


@pytest.mark.proves("structured_output", engine="sglang")
@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text=SCHEMA), lambda text: "a" in json.loads(text)),
        (Constraint(kind=ConstraintKind.REGEX, text="(ab){3}c"), lambda text: text == "abababc"),
        (Constraint(kind=ConstraintKind.CHOICE, options=("yes", 'n"o')), lambda text: text in ("yes", 'n"o')),
        (Constraint(kind=ConstraintKind.GRAMMAR, text='root ::= "x" [0-9] "y"'), lambda text: text[::2] == "xy"),
    ],
    ids=["schema", "regex", "choice", "grammar"],
)
async def test_structured_output(engines: Engines, alone: EngineDriver, constraint: Constraint, check: Any) -> None:
    """The answer satisfies the constraint and ends by itself."""
    generation = engines.greedy(10, max_tokens=60, ignore_eos=False, constraint=constraint)
    record = await alone.run(generation)
    assert record.done.reason is FinishReason.STOP
    assert check(text_of(record.tokens)), text_of(record.tokens)


async def test_a_constraint_that_does_not_compile(engines: Engines, alone: EngineDriver) -> None:
    """Only its own request fails, and the error names the field."""
    constraint = Constraint(kind=ConstraintKind.REGEX, text="(")
    record = await alone.run(engines.greedy(10, constraint=constraint))
    assert isinstance(record.done.error, InvalidRequestError)
    assert record.done.error.field == "generation.sampling.constraint"
    assert len((await alone.run(engines.greedy(10))).tokens) == 8


async def test_a_machine_without_a_compiler(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would compile functions for penalties and seeds. Without a compiler such requests and the engine still work."""
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "/no/compiler")
    # Disables the cache of compiled functions, which could replace the compiler.
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    engine = await engines.start(has_kv_transfer=False, is_fork=False)
    for sampling in ({"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"temperature": 1.0, "seed": 5}):
        assert len((await engine.run(engines.greedy(10, **sampling))).tokens) == 8


@pytest.mark.proves("seed", engine="sglang")
async def test_seeds(engines: Engines, alone: EngineDriver) -> None:
    """The same seed gives the same answer whatever else runs, also when it is continued. Another seed gives another answer."""
    sampled = engines.greedy(10, max_tokens=24, temperature=1.0, seed=5)
    first = await alone.run(sampled)
    records = [alone.submit(sampled), alone.submit(engines.greedy(40, max_tokens=30, temperature=1.0))]
    assert (await alone.wait(records[0])).tokens == first.tokens
    other = replace(sampled, sampling=replace(sampled.sampling, seed=6))
    assert (await alone.run(other)).tokens != first.tokens
    rest = await alone.run(replace(sampled, emitted_token_ids=first.tokens[:9]))
    assert rest.tokens == first.tokens[9:]
    await alone.wait(records[1])


async def test_requests_without_a_seed_differ(engines: Engines, alone: EngineDriver) -> None:
    sampled = engines.greedy(10, max_tokens=24, temperature=1.0)
    assert (await alone.run(sampled)).tokens != (await alone.run(sampled)).tokens


async def test_a_continuation_has_the_same_logprobs(engines: Engines, alone: EngineDriver) -> None:
    """In float32: emitted tokens are computed as a part of the prompt, with other shapes than step by step. The second case cannot use the
    cache."""
    generation = engines.greedy(300, max_tokens=16, logprobs=2)
    whole = await alone.run(generation)
    for count, salt in ((1, ""), (9, "other")):
        rest = await alone.run(replace(generation, emitted_token_ids=whole.tokens[:count], cache_salt=salt))
        assert rest.tokens == whole.tokens[count:]
        values = [[each.logprob for each in record.logprobs] for record in (rest, whole)]
        assert values[0] == pytest.approx(values[1][count:], abs=1e-4)


@pytest.mark.proves("logit_bias", engine="sglang")
async def test_logit_bias(engines: Engines, alone: EngineDriver) -> None:
    record = await alone.run(engines.greedy(10, logit_bias=((77, 100.0),)))
    assert set(record.tokens) == {77}


@pytest.mark.proves("priority", engine="sglang")
async def test_a_larger_priority_goes_first(engines: Engines, alone: EngineDriver) -> None:
    """Of the requests that wait behind a full batch, the one with the larger priority runs first."""
    running = [alone.submit(engines.greedy(10, max_tokens=1900)) for _ in range(2)]
    for record in running:
        await alone.wait_tokens(record, 1)
    low = alone.submit(replace(engines.greedy(10, max_tokens=30), priority=-5))
    high = alone.submit(replace(engines.greedy(10, max_tokens=30), priority=5))
    # Both wait now, however late this process submitted them.
    async with asyncio.timeout(PATIENCE_S):
        while alone.engine.load().waiting_requests != 2:
            await asyncio.sleep(0.005)
    alone.engine.cancel_nowait(running[0].key)
    for record in (high, low):
        await alone.wait(record)
    alone.engine.cancel_nowait(running[1].key)
    for record in running:
        await alone.wait(record)
    # The order of the first tokens, because this process may receive many steps at once.
    assert alone.began.index(high.key) < alone.began.index(low.key)


async def test_cancel_of_one_leg_does_not_affect_others(engines: Engines, alone: EngineDriver) -> None:
    """SGLang aborts all requests whose id begins with the given id. The adapter therefore writes numbers of legs with equal lengths."""
    # The first request is long, so that it still runs when the cancel arrives on a busy machine.
    records = [alone.submit(engines.greedy(10, max_tokens=40 if number else 1900)) for number in range(20)]
    alone.engine.cancel_nowait(records[0].key)
    assert (await alone.wait(records[0])).done.reason is FinishReason.CANCELLED
    for record in records[1:]:
        assert (await alone.wait(record)).done.reason is FinishReason.LENGTH


async def test_death_of_the_engine(engines: Engines) -> None:
    """The reader of steps gets a LostError immediately, and later legs are refused."""
    driver = await engines.start(has_kv_transfer=False)
    await driver.wait_tokens(driver.submit(engines.greedy(10, max_tokens=500)), 2)
    host_of(driver).send_signal(signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await driver._tasks[0]
    assert isinstance(driver.error, LostError)
    with pytest.raises(UnavailableError):
        driver.submit(engines.greedy(10))


@pytest.mark.proves("embeddings", engine="sglang")
async def test_embeddings(engines: Engines) -> None:
    """Embeddings are unit vectors, the same for the same tokens, also for a cached prompt. The engine serves nothing else."""
    driver = await engines.start(has_kv_transfer=False, is_embedding=True)
    assert "embeddings" in driver.engine.describe().capabilities.features
    generation, other = engines.greedy(40), engines.greedy(40)
    records = [driver.submit(each, task=LegTask.EMBED) for each in (generation, other)]
    first, second = [(await driver.wait(record)).done.embedding for record in records]
    again = (await driver.wait(driver.submit(generation, task=LegTask.EMBED))).done.embedding
    assert first is not None and second is not None and again is not None
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
    assert again == pytest.approx(first, abs=1e-4)
    assert first != pytest.approx(second, abs=1e-2)
    await driver.wait_blocks(0, PATIENCE_S)
    with pytest.raises(UnsupportedError):
        driver.submit(generation)
    await driver.aclose()


async def test_unknown_and_own_arguments_are_refused(engines: Engines) -> None:
    for name in ("no_such_argument", "page_size"):
        with pytest.raises(InvalidRequestError, match=name):
            await engines.start(has_kv_transfer=False, engine_arguments={name: 1})


async def test_mooncake_with_retraction(engines: Engines, alone: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over `mooncake_tcp`, a decode engine that retracts requests every few steps gives the same tokens as one engine, with 16 requests at
    once."""
    require_part("mooncake")
    # SGLang reads these variables when it is imported, so a fork would not see them.
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    pair = await asyncio.gather(
        engines.start(role="prefill", transfer_backend="mooncake_tcp"),
        engines.start(role="decode", transfer_backend="mooncake_tcp", is_fork=False),
    )
    generations = [engines.greedy(10 + 16 * number, max_tokens=16) for number in range(50)]
    expected = [(await alone.run(generation)).tokens for generation in generations]
    gate = asyncio.Semaphore(16)

    async def answer(generation: Generation) -> list[int]:
        async with gate:
            return await hand_over(engines, pair, generation)

    assert await asyncio.gather(*map(answer, generations)) == expected
    assert pair[1].engine.load().preempted_requests_total > 0
    for driver in pair:
        await driver.wait_blocks(0, PATIENCE_S)
        assert driver.violations == []
        await driver.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engines: Engines) -> tuple[EngineDriver, EngineDriver]:
    prefill, decode = await asyncio.gather(engines.start(role="prefill"), engines.start(role="decode"))
    return prefill, decode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient_pair(engines: Engines) -> tuple[EngineDriver, EngineDriver]:
    """A pair whose legs soon give up a counterpart. On a busy machine a handoff may take longer than that."""
    limits = {"pull_timeout_s": 2.0, "lease_s": 3.0}
    prefill, decode = await asyncio.gather(
        engines.start(role="prefill", **limits), engines.start(role="decode", **limits)
    )
    return prefill, decode


async def hand_over(engines: Engines, pair: tuple[EngineDriver, EngineDriver], generation: Generation) -> list[int]:
    prefill, decode = pair
    where = engines.room(prefill)
    records = [
        decode.submit(generation, rendezvous=where),
        prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where),
    ]
    await prefill.wait(records[1])
    return (await decode.wait(records[0])).tokens


async def test_a_pair_gives_the_tokens_of_one_engine(
    engines: Engines, alone: EngineDriver, pair: tuple[EngineDriver, EngineDriver]
) -> None:
    """In float32, a pair gives the same tokens as one engine for several concurrent prompts of up to 800 tokens, which are computed in
    chunks."""
    generations = [engines.greedy(tokens, max_tokens=12) for tokens in (10, 16, 17, 100, 300, 530, 800)]
    expected = [(await alone.run(generation)).tokens for generation in generations]
    assert await asyncio.gather(*(hand_over(engines, pair, each) for each in generations)) == expected


async def test_constraints_over_a_pair(
    engines: Engines, alone: EngineDriver, pair: tuple[EngineDriver, EngineDriver]
) -> None:
    """The prefill engine samples the first token under the constraint, and the decode engine continues it. The answer equals that of one
    engine."""
    for constraint in (
        Constraint(kind=ConstraintKind.JSON_SCHEMA, text=SCHEMA),
        Constraint(kind=ConstraintKind.REGEX, text="(ab){3}c"),
        Constraint(kind=ConstraintKind.CHOICE, options=("yes", 'n"o')),
    ):
        generation = engines.greedy(40, max_tokens=60, ignore_eos=False, constraint=constraint)
        assert await hand_over(engines, pair, generation) == (await alone.run(generation)).tokens


async def check_works(engines: Engines, pair: tuple[EngineDriver, EngineDriver]) -> None:
    """Checks that the pair answers a request, which is repeated as the frontend does after lost KV."""
    async with asyncio.timeout(PATIENCE_S):
        while len(await hand_over(engines, pair, engines.greedy(40))) != 8:
            pass


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_a_leg_without_its_counterpart_ends(
    engines: Engines, impatient_pair: tuple[EngineDriver, EngineDriver], side: str
) -> None:
    """The leg ends within seconds with the error after which the frontend places the request again. No block stays in use, and the pair still
    works."""
    prefill, decode = impatient_pair
    generation, where = engines.greedy(40), engines.room(prefill)
    if side == "decode":
        driver, record = decode, decode.submit(generation, rendezvous=where)
    else:
        driver, record = prefill, prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where)
    assert isinstance((await driver.wait(record)).done.error, KvLostError)
    await driver.wait_blocks(0, PATIENCE_S)
    await check_works(engines, impatient_pair)


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_cancel_of_a_leg_that_waits_for_its_counterpart(
    engines: Engines, pair: tuple[EngineDriver, EngineDriver], side: str
) -> None:
    prefill, decode = pair
    generation, where = engines.greedy(40), engines.room(prefill)
    if side == "decode":
        driver, record = decode, decode.submit(generation, rendezvous=where)
    else:
        driver, record = prefill, prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where)
    driver.engine.cancel_nowait(record.key)
    assert (await driver.wait(record)).done.reason is FinishReason.CANCELLED
    await driver.wait_blocks(0, PATIENCE_S)
    load = driver.engine.load()
    assert load.bootstrapping_requests == load.preallocating_requests == load.receiving_requests == 0


async def test_without_a_transfer_the_tokens_differ(
    engines: Engines, alone: EngineDriver, pair: tuple[EngineDriver, EngineDriver]
) -> None:
    """Proves that the tests above transfer KV: the warm-up has no counterpart, and the engine answers from empty blocks."""
    generation = replace(engines.greedy(100, max_tokens=12), cache_salt=INTERNAL_SALT)
    record = await pair[1].run(generation)
    assert len(record.tokens) == 12
    assert record.tokens != (await alone.run(generation)).tokens


async def test_the_fake_backend_serves_no_clients(engines: Engines, pair: tuple[EngineDriver, EngineDriver]) -> None:
    decode = await engines.start(role="decode", transfer_backend="fake")
    with pytest.raises(UnsupportedError, match="fake"):
        decode.submit(engines.greedy(40), rendezvous=engines.room(pair[0]))
    await decode.aclose()
    with pytest.raises(InvalidRequestError, match="fake"):
        await engines.start(role="prefill", transfer_backend="fake")


async def test_a_wrong_bootstrap_port(engines: Engines, impatient_pair: tuple[EngineDriver, EngineDriver]) -> None:
    """No server listens there. The decode leg ends by itself although the prefill leg waits, and the pair still works."""
    prefill, decode = impatient_pair
    (port,) = free_ports(1)
    where, generation = replace(engines.room(prefill), port=port), engines.greedy(40)
    record = decode.submit(generation, rendezvous=where)
    source = prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where)
    for driver, leg in ((decode, record), (prefill, source)):
        assert isinstance((await driver.wait(leg)).done.error, KvLostError)
        await driver.wait_blocks(0, PATIENCE_S)
    await check_works(engines, impatient_pair)


async def test_failures_that_sglang_injects(engines: Engines, alone: EngineDriver) -> None:
    """SGLang's own test switch fails polls of both engines at random. A pair of legs ends with the right tokens, or with the error after
    which the frontend places the request again. No block stays in use on either side."""
    chance = {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.02"}
    # A leg whose counterpart failed waits for that long. The other legs must end earlier, also on a busy machine.
    limits = {"pull_timeout_s": 8.0, "lease_s": 9.0}
    prefill, decode = await asyncio.gather(
        engines.start(env=chance, role="prefill", **limits), engines.start(env=chance, role="decode", **limits)
    )
    generations = [engines.greedy(40 + number) for number in range(40)]
    expected = [(await alone.run(generation)).tokens for generation in generations]
    outcomes: set[bool] = set()
    # An engine that waits for the other one polls more often, and all its legs may fail.
    async with asyncio.timeout(2 * PATIENCE_S):
        while len(outcomes) < 2:
            rooms = [engines.room(prefill) for _ in generations]
            legs = [decode.submit(each, rendezvous=where) for each, where in zip(generations, rooms, strict=True)]
            sources = [
                prefill.submit(each, task=LegTask.PREFILL, rendezvous=where)
                for each, where in zip(generations, rooms, strict=True)
            ]
            for leg, source, tokens in zip(legs, sources, expected, strict=True):
                await prefill.wait(source)
                await decode.wait(leg)
                errors = [each.done.error for each in (leg, source) if each.done.error is not None]
                assert all(isinstance(error, KvLostError) for error in errors), errors
                assert leg.done.error is not None or leg.tokens == tokens
                outcomes.add(bool(errors))
    # Waits for both before either is closed: an engine keeps blocks into which the other one may still write.
    for driver in (prefill, decode):
        await driver.wait_blocks(0, PATIENCE_S)
    for driver in (prefill, decode):
        assert driver.violations == []
        await driver.aclose()


@pytest.mark.proves("data_parallel_ranks", engine="sglang")
async def test_two_data_parallel_ranks(engines: Engines, alone: EngineDriver) -> None:
    """Each rank of a prefill worker can hand off to each rank of a decode worker, with the same tokens as one engine. Each rank has its own
    cache."""
    prefill, decode = await asyncio.gather(
        engines.start(ranks=2, role="prefill"), engines.start(ranks=2, role="decode")
    )
    addresses = prefill.engine.describe().rank_rendezvous_addresses
    assert len(set(addresses)) == 2
    generations = [engines.greedy(100) for _ in range(4)]
    for number, generation in enumerate(generations):
        source, reader = divmod(number, 2)
        host, _, port = addresses[source].rpartition(":")
        where = Rendezvous(host=host, port=int(port), room=number + 1, prefill_data_parallel_rank=source)
        leg = decode.submit(replace(generation, data_parallel_rank=reader), rendezvous=where)
        on_source = replace(generation, data_parallel_rank=source)
        record = await prefill.wait(prefill.submit(on_source, task=LegTask.PREFILL, rendezvous=where))
        assert record.done.reason is FinishReason.HANDED_OFF, record.done
        assert (await decode.wait(leg)).tokens == (await alone.run(generation)).tokens
    for driver in (prefill, decode):
        await driver.wait_blocks(0, PATIENCE_S)
        assert [load.kv_blocks_used for load in driver.engine.rank_loads()] == [0, 0]
        await driver.wait_cached([block for each in generations for block in block_hashes(each.token_ids, 16)])
        await driver.aclose()


@pytest.mark.proves("multi_rank", engine="sglang")
async def test_tensor_parallel_ranks(engines: Engines, alone: EngineDriver) -> None:
    """Two ranks give the same tokens as one. Only rank 0 has the link. If another rank is killed, the engine is lost and no process is left."""
    driver = await engines.start(has_kv_transfer=False, tensor_parallel_size=2)
    generations = [engines.greedy(tokens) for tokens in (20, 130)]
    for generation in generations:
        assert (await driver.run(generation)).tokens == (await alone.run(generation)).tokens
    leader = host_of(driver)._child.pid
    ranks = [pid for pid in descendants(leader) if b"spawn_main" in b" ".join(command_line(pid))]
    assert ranks
    os.kill(ranks[0], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await driver._tasks[0]
        assert isinstance(driver.error, LostError)
        while any(process_state(pid) != "Z" for pid in (leader, *ranks)):
            await asyncio.sleep(0.02)


async def test_ranks_on_a_cpu_do_not_use_nccl(engines: Engines, tmp_path: Path) -> None:
    """A CUDA build of torch includes NCCL, which would fail on CPU tensors. Without it ranks use gloo."""
    log = tmp_path / "nccl.txt"
    assert await engines.run("tests.integration.sglang_nccl", log) == 1
    text = log.read_text()
    assert "loaded" not in text and "NCCL is not used on a CPU" in text, text


async def test_killed_prefill_engine(engines: Engines) -> None:
    """When the engine that computes the prompt dies, a decode leg ends by itself within seconds, and its blocks are freed."""
    limits = {"pull_timeout_s": 2.0, "lease_s": 3.0}
    prefill, decode = await asyncio.gather(
        engines.start(role="prefill", **limits), engines.start(role="decode", **limits)
    )
    where, generation = engines.room(prefill), engines.greedy(700)
    host_of(prefill).send_signal(signal.SIGSTOP)
    record = decode.submit(generation, rendezvous=where)
    prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where)
    host_of(prefill).kill()
    assert isinstance((await decode.wait(record)).done.error, KvLostError)
    await decode.wait_blocks(0, PATIENCE_S)


@pytest.mark.proves("role_change", engine="sglang")
async def test_two_engines_swap_their_roles(engines: Engines, alone: EngineDriver) -> None:
    """A pair changes roles twice, so that each engine creates its second role once and returns to its first once. Tokens equal those of one
    engine, KV is transferred each time, and no block is lost."""
    pair = [await engines.start(role=role, can_switch_role=True) for role in ("prefill", "decode")]
    for _ in range(2):
        for prefill, decode in (pair, pair[::-1]):
            await prefill.engine.set_role(Role.PREFILL)
            await decode.engine.set_role(Role.DECODE)
            for tokens in (20, 300):
                generation, room = engines.greedy(tokens), engines.room(prefill)
                before = decode.engine.load().transferred_tokens_total
                first = prefill.submit(generation, task=LegTask.PREFILL, rendezvous=room)
                record = await decode.wait(decode.submit(generation, rendezvous=room))
                assert (await prefill.wait(first)).done.reason is FinishReason.HANDED_OFF
                assert record.tokens == (await alone.run(generation)).tokens
                assert decode.engine.load().transferred_tokens_total - before == tokens
            for driver in (prefill, decode):
                await driver.wait_blocks(0, PATIENCE_S)
                assert not driver.engine.load().kv_blocks_unaccounted


@pytest.mark.proves("multi_node", engine="sglang")
async def test_ranks_on_two_machines(engines: Engines, alone: EngineDriver, tmp_path: Path) -> None:
    """One rank on each of two machines gives the same tokens as one engine. The second machine serves only its metrics, and ends with the
    leader."""
    port, metrics_port = adjacent_free_ports(), free_ports(1)[0]
    nodes = {"nodes": 2, "nodes_address": f"127.0.0.1:{port}"}
    log = tmp_path / "follower.txt"
    flags = (
        *("--engine", "sglang", "--model", engines.model, "--telemetry-metrics-port", str(metrics_port)),
        *(
            "--sglang-python",
            str(require_part("sglang")),
            "--sglang-dtype",
            "float32",
            "--sglang-kv-cache-bytes",
            str(16 << 20),
        ),
        *("--sglang-nodes", "2", "--sglang-node-rank", "1", "--sglang-nodes-address", f"127.0.0.1:{port}"),
        *("--sglang-tensor-parallel-size", "2", "--no-sglang-has-kv-transfer"),
    )
    with log.open("wb") as output:
        follower = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.decode", *flags, cwd=ROOT, stdout=output, stderr=output
        )
    try:
        leader = await engines.start(has_kv_transfer=False, tensor_parallel_size=2, **nodes)
        for tokens in (20, 130):
            generation = engines.greedy(tokens)
            assert (await leader.run(generation)).tokens == (await alone.run(generation)).tokens
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
            assert response.status == 200
        await leader.engine.aclose()
        async with asyncio.timeout(PATIENCE_S):
            assert await follower.wait() == 1, log.read_text()
    finally:
        if follower.returncode is None:
            follower.kill()
            await follower.wait()


async def test_an_engine_whose_other_machine_dies_is_lost(engines: Engines) -> None:
    nodes = {
        "nodes": 2,
        "nodes_address": f"127.0.0.1:{adjacent_free_ports()}",
        "tensor_parallel_size": 2,
        "has_kv_transfer": False,
    }
    leader, follower = await asyncio.gather(engines.start(**nodes), engines.start(**nodes, node_rank=1))
    host_of(follower).kill()
    async with asyncio.timeout(PATIENCE_S):
        await leader._tasks[0]
    assert isinstance(leader.error, LostError)
