"""The main job: real vLLM engines, real NIXL, the whole mesh between."""

import asyncio
import json
import random
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
from tests.integration.mesh import ROOT, RunningMesh, chat, metrics_text, running_mesh, wait_until, worker_metric
from tests.parts import require_part
from tests.patience import PATIENCE_S

MODEL = ROOT / "models" / "demo"
PROMPTS = 50
ANSWER_TOKENS = 16

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """One prefill and one decode worker, as `make up` starts them."""
    require_part("vllm")
    require_part("nixl")
    # Chunks of a prompt depend on time, and the order of additions on chunks. In bfloat16 that decides close calls. Where a
    # prompt is computed depends on time too, unless the policy looks at no costs.
    argv = ("--greeting", "", "--policy", "round_robin", "--engine-args=--vllm-dtype float32")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv, ready_timeout_s=180) as running:
        yield running


async def instance(mesh: RunningMesh, service: str) -> Instance:
    """The only instance of a service."""
    registry = mesh.target.registry()
    try:
        return (await registry.instances(service)).instances[0]
    finally:
        await registry.aclose()


async def worker_total(mesh: RunningMesh, service: str, name: str) -> float:
    """A worker's metric."""
    worker = await instance(mesh, service)
    return worker_metric(await metrics_text(worker.host, int(worker.meta["metrics_port"])), f"kvmesh_worker_{name}")


def make_prompts(vocabulary_size: int, seed: int = 7) -> list[list[int]]:
    """Token ids without a meaning, 16 to 800 long, no two with a common beginning. Shorter ones are not handed over at all."""
    rng = random.Random(seed)
    lengths = [16 + round(784 * i / (PROMPTS - 1)) for i in range(PROMPTS)]
    return [[rng.randrange(10, vocabulary_size) for _ in range(length)] for length in lengths]


async def answers_alone(prompts: list[list[int]], *, model: Path = MODEL) -> list[list[int]]:
    """What one vLLM engine says without kvmesh."""
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


async def answer(stub: InferenceServiceStub, prompt: list[int], *, tokens: int = ANSWER_TOKENS) -> list[int]:
    """Greedy token ids through the mesh."""
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


async def test_tokens_equal_those_of_one_engine_alone(mesh: RunningMesh) -> None:
    """50 prompts of 16 to 800 tokens; the decode engine computes none of what came over NIXL."""
    vocabulary_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    prompts = make_prompts(vocabulary_size)
    names = ("prompt_tokens_total", "transferred_tokens_total", "cached_tokens_total")
    before = {name: await worker_total(mesh, DECODE, name) for name in names}
    prefilled = await worker_total(mesh, PREFILL, "prompt_tokens_total")
    frontend = await instance(mesh, FRONTEND)
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub = InferenceServiceStub(channel)
        through_mesh = [await answer(stub, prompt) for prompt in prompts]
    assert through_mesh == await answers_alone(prompts)
    moved = {name: await worker_total(mesh, DECODE, name) - before[name] for name in names}
    total = sum(len(prompt) for prompt in prompts)
    assert moved["cached_tokens_total"] == 0
    assert moved["transferred_tokens_total"] >= total - PROMPTS
    assert moved["prompt_tokens_total"] <= PROMPTS, "the decode engine computed more than each prompt's last token"
    assert await worker_total(mesh, PREFILL, "prompt_tokens_total") - prefilled == total


async def test_a_single_token_is_that_of_one_engine_alone(mesh: RunningMesh) -> None:
    """The prefill engine answers, log-probabilities and structured output included; the decode engine computes nothing."""
    vocabulary_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    prompts = make_prompts(vocabulary_size, seed=8)[::7]  # No decode engine holds them.
    names = ("prompt_tokens_total", "transferred_tokens_total", "output_tokens_total")
    before = [await worker_total(mesh, DECODE, name) for name in names]
    frontend = await instance(mesh, FRONTEND)
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub = InferenceServiceStub(channel)
        single = [await answer(stub, prompt, tokens=1) for prompt in prompts]
    yes: Any = await chat(mesh.url, "Is 2 + 3 equal to 5?", max_tokens=1, structured_outputs={"choice": ["1", "0"]})
    assert yes["choices"][0]["message"]["content"] in ("1", "0")
    scored: Any = await chat(mesh.url, "What is 2 + 3?", max_tokens=1, temperature=0, logprobs=True, top_logprobs=3)
    assert [len(entry["top_logprobs"]) for entry in scored["choices"][0]["logprobs"]["content"]] == [3]
    assert [await worker_total(mesh, DECODE, name) for name in names] == before
    assert single == [tokens[:1] for tokens in await answers_alone(prompts)]
    assert await worker_total(mesh, PREFILL, "kv_blocks_used") == 0


async def test_answers_are_readable(mesh: RunningMesh) -> None:
    """The demo model greets, adds and answers in JSON."""
    greeting = json.dumps(await chat(mesh.url, "Hello!", max_tokens=40, temperature=0))
    assert any(word in greeting for word in ("Hello", "Hi", "hello")), greeting
    total = json.dumps(await chat(mesh.url, "What is 2 + 3?", max_tokens=20, temperature=0))
    assert "5" in total


async def test_a_client_that_leaves_frees_blocks_on_both_sides(mesh: RunningMesh) -> None:
    """Cancelled in mid-stream on vLLM too: nothing is held or leased any more, and the engine goes on."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "a long story " * 60,
        "max_tokens": 1000,
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
    assert await worker_total(mesh, DECODE, "output_tokens_total") - before < body["max_tokens"], "it ran to its end"
    await chat(mesh.url, "still there?", max_tokens=5)


async def test_many_at_once_all_end(mesh: RunningMesh) -> None:
    """24 requests of several choices each, some cancelled: every one ends, nothing is left behind."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(chat(mesh.url, f"Repeat: word number {i}", max_tokens=12, temperature=0.7, seed=i, n=2))
            for i in range(24)
        ]
    assert all(len(task.result()["choices"]) == 2 for task in tasks)  # type: ignore[arg-type]
    assert await worker_total(mesh, DECODE, "legs_requests") == 0


async def test_a_crowd_of_seeded_choices_without_prefill_workers(tmp_path: Path) -> None:
    """A lone decode worker computes 20 seeded prompts in steps while others decode, three choices each: all are answered, the
    same seeds give the same answers again, and the engine lives."""
    require_part("vllm")
    argv = ("--greeting", "", "--prefill", "0", "--decode", "1", "--restarts-max", "0")
    async with running_mesh(tmp_path, *argv, ready_timeout_s=180) as mesh:
        pids = mesh.pids("decode")

        async def ask(seed: int) -> list[str]:
            text = f"{seed} {'a long story ' * 100}"
            got: Any = await chat(mesh.url, text, max_tokens=12, temperature=1.0, seed=seed, n=3)
            return [choice["message"]["content"] for choice in got["choices"]]

        first, second = [await asyncio.gather(*map(ask, range(20))) for _ in range(2)]
        assert [len(choices) for choices in first] == [3] * 20
        assert first == second
        assert mesh.pids("decode") == pids


async def test_the_greeting_comes_over_nixl(tmp_path: Path) -> None:
    """`make up`'s own first answer, told on the terminal, and everything stops cleanly afterwards."""
    require_part("vllm")
    require_part("nixl")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "up", "--port", "0", "--once", "--run-dir", str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 200)
    text = out.decode()
    assert process.returncode == 0, text
    assert "> Hello! Who are you?" in text
    assert "curl -N http://127.0.0.1:" in text
    assert "demo model" in text, text


IN_TURNS = """
import asyncio, os, sys, time
from kvmesh.cli.gpu_plan import WorkerPlaces
from kvmesh.cli.state import claim_place
from kvmesh.cli.up import Mesh
from kvmesh.cli.up_settings import UpSettings
from kvmesh.settings import load
settings = load(UpSettings, argv=sys.argv[1:], environ=os.environ, program="kvmesh up", description="")
places = WorkerPlaces(turns={"prefill-0": 0, "decode-0": 1})
with claim_place("in-turns", settings.run_dir) as place:
    mesh = Mesh(settings, place=place, started_at_s=time.monotonic(), forked={}, places=places)
    sys.exit(asyncio.run(mesh.run()))
"""
"""`kvmesh up` with workers placed as those that share a GPU are: the CPU build measures no memory, and needs no turns."""


async def test_workers_that_share_a_device_start_one_after_the_other(tmp_path: Path) -> None:
    """The second worker's process starts when the first one's engine is ready; together they answer."""
    require_part("vllm")
    require_part("nixl")
    first, second = tmp_path / "prefill-0.log", tmp_path / "decode-0.log"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IN_TURNS, "--port", "0", "--once", "--run-dir", str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    answer = asyncio.create_task(process.communicate())
    try:
        async with asyncio.timeout(200):
            while not second.exists() and not answer.done():
                await asyncio.sleep(0.02)
            assert "rpc_server_started" in first.read_text()
            text = (await answer)[0].decode()
    finally:
        if process.returncode is None:
            process.terminate()
        await answer
    assert process.returncode == 0, text
    assert "demo model" in text, text
