"""The main use case: a whole mesh with real vLLM engines and real NIXL."""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.api.types.v1.sampling_pb2 import SamplingParams
from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, Instance
from kvmesh.engines.vllm.alone import MARK
from tests.integration.mesh import (
    ROOT,
    RunningMesh,
    chat,
    command_line,
    descendants,
    metrics_text,
    process_state,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.integration.test_up_restarts import PATIENCE_S as RESTART_S
from tests.integration.test_up_restarts import answers, passing, restarted
from tests.integration.test_worker_commands import command
from tests.parts import require_part
from tests.patience import PATIENCE_S
from tests.security.handle_attacks import check_stolen_handles

MODEL = ROOT / "models" / "demo"
ANSWER_TOKENS = 16

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(300)]


IN_TURNS = """
import runpy, sys
from kvmesh.cli import up
from kvmesh.cli.gpu_plan import WorkerPlaces
up.worker_places = lambda settings: WorkerPlaces(turns={"prefill-0": 0, "decode-0": 1})
del sys.argv[:3]
runpy.run_module("kvmesh.cli", run_name="__main__")
"""
"""Runs `kvmesh up` with workers placed as if they shared a GPU. The CPU build does not measure memory, and would start them at the same time.
Its arguments are the whole command."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RunningMesh, bool]]:
    """One prefill and one decode worker, and whether the first was ready when the second started."""
    require_part("vllm")
    require_part("nixl")
    # Chunks of a prompt depend on timing, and the order of additions depends on chunks. In bfloat16 that changes close decisions. Also where a
    # prompt is computed depends on timing, unless the policy ignores costs.
    argv = ("--policy", "round_robin", "--engine-args=--vllm-dtype float32")
    directory = tmp_path_factory.mktemp("mesh")
    watch = asyncio.create_task(is_first_ready(directory / "prefill-0.log", directory / "decode-0.log"))
    prefix = (sys.executable, "-c", IN_TURNS)
    async with running_mesh(directory, *argv, ready_timeout_s=180, prefix=prefix) as running:
        yield running, await watch


async def is_first_ready(first: Path, second: Path) -> bool:
    """Returns whether the first worker's log says that it serves, at the moment when the second worker has a log."""
    await wait_until(second.exists, 200, "the second worker starts")
    return "rpc_server_started" in await asyncio.to_thread(first.read_text)


@pytest.fixture(scope="module")
def mesh(started: tuple[RunningMesh, bool]) -> RunningMesh:
    return started[0]


async def instance(mesh: RunningMesh, service: str) -> Instance:
    """Returns the only instance of a service."""
    registry = mesh.target.registry()
    try:
        return (await registry.instances(service)).instances[0]
    finally:
        await registry.aclose()


async def worker_total(mesh: RunningMesh, service: str, name: str) -> float:
    """Returns a metric of the only worker of a service."""
    worker = await instance(mesh, service)
    return worker_metric(await metrics_text(worker.host, int(worker.meta["metrics_port"])), f"kvmesh_worker_{name}")


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, 16 to 800 long, without common prefixes. Shorter prompts would not be handed off."""
    rng = random.Random(seed)
    vocabulary_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    lengths = [16 + round(784 * i / (count - 1)) for i in range(count)]
    return [[rng.randrange(10, vocabulary_size) for _ in range(length)] for length in lengths]


ANSWERED, SINGLE = make_prompts(50, 7), make_prompts(8, 8)
PROMPTS = ANSWERED + SINGLE


async def answers_alone(prompts: list[list[int]], *, model: Path = MODEL) -> list[list[int]]:
    """Returns the answers of one vLLM engine without kvmesh."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.engines.vllm.alone"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    task = {"model": str(model), "prompts": prompts, "max_tokens": ANSWER_TOKENS, "dtype": "float32"}
    out, err = await asyncio.wait_for(process.communicate(json.dumps(task).encode()), 200)
    lines = [line for line in out.decode().splitlines() if line.startswith(MARK)]
    assert lines, err.decode()[-2000:]
    answers: list[list[int]] = json.loads(lines[0].removeprefix(MARK))
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> list[list[int]]:
    """The answers of one engine to PROMPTS."""
    return await answers_alone(PROMPTS)


async def answer(stub: InferenceServiceStub, prompt: list[int], *, tokens: int = ANSWER_TOKENS) -> list[int]:
    """Returns greedy token ids from the mesh."""
    request = pb.GenerateRequest(
        model="demo",
        token_ids=pb.TokenIds(ids=prompt),
        options=pb.GenerationOptions(
            return_token_ids=True,
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        ),
    )
    token_ids: list[int] = []
    async for response in stub.Generate(request, timeout=60):
        token_ids += response.token_ids
    return token_ids


async def test_tokens_equal_those_of_one_engine_alone(mesh: RunningMesh, alone: list[list[int]]) -> None:
    """50 prompts of 16 to 800 tokens get the same tokens. The decode engine computes only the last token of each prompt; the rest is pulled
    over NIXL. On a busy machine a pull may be abandoned, and its prompt is computed again."""
    names = ("prompt_tokens_total", "transferred_tokens_total", "cached_tokens_total", "recomputed_tokens_total")
    before = {name: await worker_total(mesh, DECODE, name) for name in names}
    prefilled = await worker_total(mesh, PREFILL, "prompt_tokens_total")
    frontend = await instance(mesh, FRONTEND)
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub = InferenceServiceStub(channel)
        through_mesh = [await answer(stub, prompt) for prompt in ANSWERED]
    assert through_mesh == alone[: len(ANSWERED)]
    moved = {name: await worker_total(mesh, DECODE, name) - before[name] for name in names}
    total = sum(len(prompt) for prompt in ANSWERED)
    assert moved["cached_tokens_total"] == 0
    recomputed = moved["recomputed_tokens_total"]
    assert recomputed <= total / 2
    assert moved["transferred_tokens_total"] >= total - recomputed - len(ANSWERED)
    assert moved["prompt_tokens_total"] <= recomputed + len(ANSWERED), (
        "the decode engine computed more than each prompt's last token"
    )
    assert await worker_total(mesh, PREFILL, "prompt_tokens_total") - prefilled == total


async def test_a_single_token_is_that_of_one_engine_alone(mesh: RunningMesh, alone: list[list[int]]) -> None:
    """The prefill engine answers, also with log-probabilities and structured output. The decode engine computes nothing."""
    names = ("prompt_tokens_total", "transferred_tokens_total", "output_tokens_total")
    before = [await worker_total(mesh, DECODE, name) for name in names]
    frontend = await instance(mesh, FRONTEND)
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub = InferenceServiceStub(channel)
        single = [await answer(stub, prompt, tokens=1) for prompt in SINGLE]  # No decode engine has these in its cache.
    yes: Any = await chat(mesh.url, "Is 2 + 3 equal to 5?", max_tokens=1, structured_outputs={"choice": ["1", "0"]})
    assert yes["choices"][0]["message"]["content"] in ("1", "0")
    scored: Any = await chat(mesh.url, "What is 2 + 3?", max_tokens=1, temperature=0, logprobs=True, top_logprobs=3)
    assert [len(entry["top_logprobs"]) for entry in scored["choices"][0]["logprobs"]["content"]] == [3]
    assert [await worker_total(mesh, DECODE, name) for name in names] == before
    assert single == [tokens[:1] for tokens in alone[len(ANSWERED) :]]

    async def is_free() -> bool:
        return await worker_total(mesh, PREFILL, "kv_blocks_used") == 0

    await wait_until(is_free, PATIENCE_S, "blocks are freed")


async def test_answers_are_readable(mesh: RunningMesh) -> None:
    """The demo model greets and adds."""
    greeting = json.dumps(await chat(mesh.url, "Hello!", max_tokens=40, temperature=0))
    assert any(word in greeting for word in ("Hello", "Hi", "hello")), greeting
    total = json.dumps(await chat(mesh.url, "What is 2 + 3?", max_tokens=20, temperature=0))
    assert "5" in total


async def test_a_disconnect_frees_blocks_on_both_sides(mesh: RunningMesh) -> None:
    """A stream is cancelled in the middle on vLLM: no block is used or leased afterwards, and the engine serves on."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "a long story " * 60,
        "max_tokens": 1700,
        "ignore_eos": True,
        "stream": True,
    }
    before = await worker_total(mesh, DECODE, "output_tokens_total")
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{mesh.url}/v1/completions", json=body)
        await response.content.readline()
        assert await worker_total(mesh, DECODE, "kv_blocks_used") > 0
        response.close()

    async def is_free() -> bool:
        used = [await worker_total(mesh, service, "kv_blocks_used") for service in (PREFILL, DECODE)]
        return used == [0, 0]

    await wait_until(is_free, PATIENCE_S, "blocks are freed on both sides")
    assert await worker_total(mesh, DECODE, "output_tokens_total") - before < body["max_tokens"], (
        "the request ran to its end"
    )
    await chat(mesh.url, "still there?", max_tokens=5)


async def test_concurrent_requests_all_end(mesh: RunningMesh) -> None:
    """24 requests of two choices each end, and no leg is left."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(chat(mesh.url, f"Repeat: word number {i}", max_tokens=12, temperature=0.7, seed=i, n=2))
            for i in range(24)
        ]
    assert all(len(task.result()["choices"]) == 2 for task in tasks)  # type: ignore[arg-type]

    async def is_idle() -> bool:
        return await worker_total(mesh, DECODE, "legs_requests") == 0

    await wait_until(is_idle, PATIENCE_S, "no leg is left")


async def test_many_seeded_choices_without_prefill_workers(mesh: RunningMesh) -> None:
    """The prefill worker is drained. The decode worker computes 20 seeded prompts while it decodes others, with three choices each. All are
    answered, the same seeds give the same answers, and the engine survives."""
    pids = mesh.pids("decode")
    prefill = (await instance(mesh, PREFILL)).instance_id
    assert await command(mesh, "drain", prefill) == (0, f"{prefill} is drained\n")
    computed = await worker_total(mesh, PREFILL, "prompt_tokens_total")

    async def ask(seed: int) -> list[str]:
        text = f"{seed} {'a long story ' * 100}"
        got: Any = await chat(mesh.url, text, max_tokens=12, temperature=1.0, seed=seed, n=3)
        return [choice["message"]["content"] for choice in got["choices"]]

    first, second = [await asyncio.gather(*map(ask, range(20))) for _ in range(2)]
    assert [len(choices) for choices in first] == [3] * 20
    assert first == second
    assert mesh.pids("decode") == pids
    assert await worker_total(mesh, PREFILL, "prompt_tokens_total") == computed
    assert (await command(mesh, "drain", prefill, "--undo"))[0] == 0


async def test_the_greeting_is_printed(mesh: RunningMesh) -> None:
    """`kvmesh up` prints the mesh's first answer on the terminal."""
    await wait_until(lambda: any("demo model" in line for line in mesh.output), PATIENCE_S, mesh.logs)
    text = "\n".join(mesh.output)
    assert "> Hello! Who are you?" in text
    assert "curl -N http://127.0.0.1:" in text


async def test_workers_refuse_stolen_handles(mesh: RunningMesh) -> None:
    """The same as tests/security/test_handles.py, with real KV."""
    await check_stolen_handles(mesh)


async def test_workers_that_share_a_device_start_one_after_the_other(started: tuple[RunningMesh, bool]) -> None:
    """The second worker's process starts when the first one's engine is ready. The other tests show that they work together."""
    assert started[1]


@pytest.mark.timeout(400)
async def test_workers_are_restarted_by_the_fork_server(mesh: RunningMesh) -> None:
    """A killed worker is forked again. If the fork server is killed, its workers end, and all of them restart.

    This is the last test of this mesh: at its end `kvmesh up` is killed, and no process survives it.
    """
    before = await passing(mesh.target, DECODE)
    (server,) = fork_servers(mesh)
    pid = await restarted(mesh, "decode")
    assert pid in descendants(server)

    async def is_back() -> bool:
        now = await passing(mesh.target, DECODE)
        return any(name.endswith(f"-{pid}") and epoch not in before.values() for name, epoch in now.items())

    await wait_until(is_back, RESTART_S, "the decode worker registers again")
    await wait_until(lambda: answers(mesh), RESTART_S, "an answer after the decode worker died")
    old = set(mesh.pids("decode") + mesh.pids("prefill"))
    os.kill(server, signal.SIGKILL)
    await wait_until(
        lambda: len(set(mesh.pids("decode") + mesh.pids("prefill")) - old) == 2, RESTART_S, "both start again"
    )
    assert fork_servers(mesh) != [server]
    await wait_until(lambda: answers(mesh), RESTART_S, "an answer after the fork server died")
    children = descendants(mesh.process.pid)
    mesh.process.kill()
    await wait_until(lambda: all(process_state(pid) == "Z" for pid in children), RESTART_S, "all end")


def fork_servers(mesh: RunningMesh) -> list[int]:
    """Returns the processes that workers are forked from. A forked worker changes its title."""
    found = []
    for pid in descendants(mesh.process.pid):
        if b"kvmesh.worker.fork_server" in command_line(pid):
            found.append(pid)
    return found
