"""The whole mesh as real processes, with simulated engines, as new users and operators see it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvmesh.cli.connection import MeshTarget
from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, ROUTER, Health, Instance
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from tests.integration.mesh import (
    ROOT,
    RunningMesh,
    argv_simulated,
    chat,
    metrics_text,
    running_mesh,
    stop_process,
    wait_until,
    worker_metric,
)
from tests.patience import PATIENCE_S
from tests.servers import Server

SLOW_STEPS = ("--engine-args=--simulated-time-factor 1",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """A mesh of 2 + 2 simulated workers in real time, for all tests that do not change it."""
    argv = argv_simulated("--prefill", "2", "--decode", "2", *SLOW_STEPS)
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """A mesh of 2 + 2 workers on which 1000 tokens take longer than PATIENCE_S, so that no stream ends before a test interrupts it."""
    slow = "--engine-args=--simulated-time-factor 1 --simulated-profile-base-s 0.1"
    async with running_mesh(
        tmp_path_factory.mktemp("slow"), *argv_simulated("--prefill", "2", "--decode", "2", slow)
    ) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def instances(target: MeshTarget, service: str) -> list[Instance]:
    """Returns a service's instances."""
    client = target.registry()
    try:
        return list((await client.instances(service)).instances)
    finally:
        await client.aclose()


async def blocks_in_use(target: MeshTarget) -> float:
    """Returns the number of KV blocks that requests or leases hold on all workers."""
    total = 0.0
    for service in (PREFILL, DECODE):
        for instance in await instances(target, service):
            text = await metrics_text(instance.host, int(instance.meta["metrics_port"]))
            total += worker_metric(text, "kvmesh_worker_kv_blocks_used")
    return total


async def test_the_openai_client_works(mesh: RunningMesh) -> None:
    """The text is the same streamed and not, and usage is counted."""
    client = openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "tell me something " * 20}]
    whole = await client.chat.completions.create(model="demo", messages=messages, max_tokens=20, temperature=0)
    parts = []
    usage = None
    stream = await client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 20
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 60
    models = [model.id async for model in client.models.list()]
    assert models == ["demo"]
    await client.close()


async def test_the_prompts_kv_is_pulled_over_nixl(mesh: RunningMesh) -> None:
    """The decode worker pulls the KV of nearly all prompt tokens from a prefill worker."""

    async def transferred() -> float:
        texts = [await metrics_text(i.host, int(i.meta["metrics_port"])) for i in await instances(mesh.target, DECODE)]
        return sum(worker_metric(text, "kvmesh_worker_transferred_tokens_total") for text in texts)

    # On a busy machine a pull may be abandoned, and the decode worker computes that prompt.
    for number in range(5):
        before = await transferred()
        answer = await chat(
            mesh.url, f"{number} is a prompt that nobody has sent before, quite long " * 10, max_tokens=5
        )
        usage: Any = answer["usage"]
        if await transferred() - before >= usage["prompt_tokens"] - 64:
            return
    pytest.fail(f"no prompt's KV is pulled\n{mesh.logs()}")


async def test_a_single_token_moves_no_kv(mesh: RunningMesh) -> None:
    """A prefill worker answers, also streamed and with several choices. Decode workers do nothing, and no block stays in use."""
    decode = await instances(mesh.target, DECODE)
    names = ("transferred_tokens_total", "prompt_tokens_total", "output_tokens_total")

    async def totals() -> list[float]:
        texts = [await metrics_text(i.host, int(i.meta["metrics_port"])) for i in decode]
        return [sum(worker_metric(text, f"kvmesh_worker_{name}") for text in texts) for name in names]

    prompt = "yes or no, after a long question that nobody has asked before? " * 12
    before = await totals()
    asked: Any = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    first: Any = await chat(mesh.url, prompt, **asked)
    # On a busy machine the router may choose another worker than for the first request, so the cache may take a few turns.
    for _ in range(5):
        both: Any = await chat(mesh.url, prompt, n=2, **asked)
        if both["usage"]["prompt_tokens_details"]["cached_tokens"]:
            break
    client = openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": prompt}]
    stream = await client.chat.completions.create(model="demo", messages=messages, stream=True, **asked)
    texts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    await client.close()
    assert await totals() == before
    async with asyncio.timeout(PATIENCE_S):
        while await blocks_in_use(mesh.target):
            await asyncio.sleep(0.05)
    two: Any = await chat(mesh.url, prompt, **{**asked, "max_tokens": 2})
    expected = two["choices"][0]["logprobs"]["content"][0]
    for answer in (first, both):
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "length"
            assert choice["logprobs"]["content"] == [expected]
    assert "".join(texts) == first["choices"][0]["message"]["content"]
    assert both["usage"]["completion_tokens"] == 2
    assert both["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_reflection_lists_the_services(mesh: RunningMesh) -> None:
    """Every server has reflection, as grpcurl needs it: the public API for all clients, the others only for operators."""
    own, public = mesh.target.channels(), ChannelPool(settings=RpcSettings())
    wanted = {
        FRONTEND: "kvmesh.inference.v1.InferenceService",
        ROUTER: "kvmesh.router.v1.RouterService",
        PREFILL: "kvmesh.prefill.v1.PrefillService",
        DECODE: "kvmesh.decode.v1.DecodeService",
    }
    for service, name in wanted.items():
        for instance in await instances(mesh.target, service):
            channels = public if service == FRONTEND else own
            stub = reflection_pb2_grpc.ServerReflectionStub(channels.channel(instance.address))
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for response in stub.ServerReflectionInfo(iter([request])):
                names = {entry.name for entry in response.list_services_response.service}
                break
            assert {name, "grpc.health.v1.Health"} <= names
            assert ("grpc.channelz.v1.Channelz" in names) is (service != FRONTEND)
    await own.aclose()
    await public.aclose()


async def test_a_disconnect_frees_all_blocks(slow_mesh: RunningMesh) -> None:
    """Closing the connection in the middle of a stream cancels the request on every worker and frees its blocks."""
    mesh = slow_mesh
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "long " * 300}],
        "max_tokens": 1000,
        "stream": True,
    }
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{mesh.url}/v1/chat/completions", json={**body, "ignore_eos": True})
        await response.content.readline()
        assert await blocks_in_use(mesh.target) > 0
        response.close()

    async def is_free() -> bool:
        return await blocks_in_use(mesh.target) == 0

    await wait_until(is_free, PATIENCE_S, "blocks are freed")


async def explain(mesh: RunningMesh, request_id: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "explain", request_id, *mesh.flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode()


async def all_join(mesh: RunningMesh) -> bool:
    registry, channels = mesh.target.registry(), mesh.target.channels()
    try:
        routers = (await registry.instances(ROUTER)).instances
        views = await GrpcRouterClient(channels, routers[0].address).list_workers(timeout_s=PATIENCE_S)
        return len(views) == 4 and not any(view.excluded_by for view in views)
    finally:
        await channels.aclose()
        await registry.aclose()


async def test_the_clients_id_explains_its_request(mesh: RunningMesh) -> None:
    """`kvmesh explain` accepts the id in the header, the id of the answer, and the mesh's id if the client sent its own. It also explains a
    request with several prompts, and reports an unknown id."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "why did you go there " * 8}], "max_tokens": 3}
    async with aiohttp.ClientSession() as session:
        given = text = ""

        async def has_ended() -> bool:
            # The frontend's last report may still be on its way to the router.
            nonlocal text
            status, text = await explain(mesh, given)
            assert status == 0, text
            return "finished after" in text

        pairs = 0
        for _ in range(5):
            await wait_until(lambda: all_join(mesh), PATIENCE_S, "all four workers are in use")
            async with session.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                given = response.headers["x-request-id"]
            await wait_until(has_ended, PATIENCE_S, lambda: text)
            pairs = sum("prefill-" in line and "decode-" in line for line in text.splitlines())
            if pairs >= 4:
                break
            # On a busy machine a worker may be late, and the router then considers no pair with it.
        assert pairs >= 4, text
        assert f"request   {given}" in text
        assert all(word in text for word in ("prefill prefill-", "decode decode-", "observed", "margin"))
        assert text.count("\n*  ") == 1
        assert (await explain(mesh, answer["id"]))[0] == 0

        own = {"x-request-id": "my-own-id"}
        async with session.post(f"{mesh.url}/v1/chat/completions", json=body, headers=own) as response:
            assert response.headers["x-request-id"] == "my-own-id"
            status, text = await explain(mesh, response.headers["x-kvmesh-request-id"])
            assert status == 0, text

        several = {"model": "demo", "prompt": ["one two three", "four five six"], "max_tokens": 2}
        async with session.post(f"{mesh.url}/v1/completions", json=several) as response:
            assert response.status == 200
            status, text = await explain(mesh, response.headers["x-request-id"])
            assert status == 0, text

        status, text = await explain(mesh, "never-sent")
        assert status == 1
        assert text.startswith("kvmesh: no router knows a request 'never-sent'")
        assert "Traceback" not in text


async def test_status_shows_the_mesh(mesh: RunningMesh) -> None:
    """The command prints a table from the registry, one from the router, and one from the planner. It waits for a router that is busy for some
    seconds."""
    async with stopped(mesh.pids("gateway")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvmesh.cli", "status", *mesh.flags),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        # Longer than a connection between services may take, and shorter than the command waits.
        await asyncio.wait([asyncio.create_task(process.wait())], timeout=5.0)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    text = out.decode()
    assert all(word in text for word in ("frontend", "router", "prefill", "decode", "planner", "passing", "RUNNING"))


async def test_top_prints_once_into_a_pipe(mesh: RunningMesh) -> None:
    """The output has each worker with its role, and no escape sequences."""
    words = ("top", *mesh.flags, "--interval-s", "0.1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", *words), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    rows = [line.split()[:2] for line in out.decode().splitlines()]
    assert process.returncode == 0
    assert rows[0] == ["WORKER", "ROLE"] and sorted(role for _, role in rows[1:]) == [*["decode"] * 2, *["prefill"] * 2]
    assert "\x1b" not in out.decode()


async def test_chat_in_the_terminal(mesh: RunningMesh) -> None:
    """Each line gets an answer, `/new` starts a new conversation, and an empty line ends the command. If the address is unreachable, the
    error is one line."""
    status, text = await chat_in_terminal(mesh.url)
    first, _, rest = text.partition("> ")[2].partition("> > ")
    assert status == 0, text
    assert len(first.split()) > 5, text
    assert rest.strip().startswith(first.strip()[:20]), "a conversation that starts over gets the first answer again"
    assert (await chat_in_terminal(mesh.url.removeprefix("http://")))[0] == 0
    status, text = await chat_in_terminal("http://127.0.0.1:9")
    assert status == 1
    assert "cannot be reached" in text
    assert "Traceback" not in text


async def test_no_worker_gives_503_with_retry_after(mesh: RunningMesh) -> None:
    """If all decode workers drain, requests get a 503 with Retry-After. Once they stop draining, requests are answered."""
    url = f"{mesh.url}/v1/chat/completions"
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    client = mesh.target.registry()
    decode = [each.instance_id for each in (await client.instances(DECODE)).instances]

    async def is_refused() -> bool:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            return response.status == 503 and int(response.headers["retry-after"]) >= 1

    async def is_answered() -> bool:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            return response.status == 200

    for name in decode:
        await client.set_draining(name, True, reason="test")
    await wait_until(is_refused, PATIENCE_S, "503")
    for name in decode:
        await client.set_draining(name, False, reason="test")
    await wait_until(is_answered, PATIENCE_S, "an answer")
    await client.aclose()


async def test_hung_workers_are_given_up(slow_mesh: RunningMesh) -> None:
    """Stopped processes keep their connections open. A prefill leg moves to another worker within seconds, and a stream ends with a typed
    error."""
    mesh = slow_mesh
    url = f"{mesh.url}/v1/chat/completions"
    await chat(mesh.url, "hello there", max_tokens=3)
    # Much less than a first token may take, with a reserve for busy machines.
    async with stopped(mesh.pids("prefill")), asyncio.timeout(PATIENCE_S):
        await chat(mesh.url, "is anybody computing prompts? " * 10, max_tokens=3)
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        responses = [await session.post(url, json={**body, "stream": True}) for _ in range(4)]
        for response in responses:
            await response.content.readline()
        async with stopped(mesh.pids("decode")), asyncio.timeout(PATIENCE_S):
            ends = [(await response.text()).strip().splitlines()[-1] for response in responses]
    assert {json.loads(end.removeprefix("data: "))["error"]["code"] for end in ends} == {"worker_silent"}

    async def answers() -> bool:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={**body, "max_tokens": 2}) as response,
        ):
            return response.status == 200

    await wait_until(answers, PATIENCE_S, "the woken workers are used again")


@asynccontextmanager
async def stopped(pids: Sequence[int]) -> AsyncIterator[None]:
    """Stops the processes with SIGSTOP, and continues them at the end."""
    try:
        for pid in pids:
            await stop_process(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_the_streams_of_a_killed_decode_worker_continue_on_the_other(tmp_path: Path, consul: Server) -> None:
    """Each stream gets all of its tokens. The router excludes the worker, and the other one serves. A real Consul lists the killed worker as
    critical."""
    argv = argv_simulated("--decode", "2", "--restarts-max", "0", "--consul", consul.url, *SLOW_STEPS)
    async with running_mesh(tmp_path, *argv) as mesh:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 600,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        async with aiohttp.ClientSession() as session:
            responses = [await session.post(f"{mesh.url}/v1/chat/completions", json=body) for _ in range(6)]
            for response in responses:
                await response.content.readline()
            os.kill(mesh.pids("decode")[0], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                texts = [await response.text() for response in responses]
        lines = [text.strip().splitlines() for text in texts]
        assert {each[-1] for each in lines} == {"data: [DONE]"}
        usages = [json.loads(each[-3].removeprefix("data: "))["usage"] for each in lines]
        assert {usage["completion_tokens"] for usage in usages} == {600}
        channels = mesh.target.channels()
        router = (await instances(mesh.target, ROUTER))[0]

        async def is_excluded() -> bool:
            views = await GrpcRouterClient(channels, router.address).list_workers(timeout_s=PATIENCE_S)
            decode = [view for view in views if view.role == "decode"]
            return sum(not view.excluded_by for view in decode) == 1

        await wait_until(is_excluded, PATIENCE_S, "the dead worker is excluded")
        for _ in range(4):
            await chat(mesh.url, "still there?", max_tokens=3)
        await channels.aclose()
        await wait_until(
            lambda: any("decode-" in line and "SIGKILL" in line for line in mesh.output), PATIENCE_S, mesh.logs
        )

        async def is_critical() -> bool:
            return sum(i.health is Health.CRITICAL for i in await instances(mesh.target, DECODE)) == 1

        await wait_until(is_critical, PATIENCE_S, "critical in Consul")


async def test_a_mesh_with_keys(tmp_path: Path) -> None:
    """The mesh starts although its greeting is refused. A key works from the moment it is listed until it is removed, without a restart."""
    first, second = [await key_and_entry() for _ in range(2)]
    keys = tmp_path / "keys.json"

    def list_keys(*entries: Any) -> None:
        (tmp_path / "new.json").write_text(json.dumps({"keys": entries}))
        (tmp_path / "new.json").replace(keys)

    list_keys(first[1])
    env = {"KVMESH_ACCESS_KEYS_FILE": str(keys)}
    async with running_mesh(tmp_path, "--engine", "simulated", "--prefill", "0", env=env) as mesh:

        async def works(key: str) -> bool:
            async with (
                aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
                session.get(f"{mesh.url}/v1/models") as response,
            ):
                assert response.status in (200, 401)
                return response.status == 200

        await wait_until(
            lambda: any("requires an API key" in line for line in mesh.output), PATIENCE_S, "the greeting is refused"
        )
        assert await works(first[0]) and not await works(second[0])
        list_keys(first[1], second[1])
        await wait_until(lambda: works(second[0]), PATIENCE_S, "the new key works")
        assert await works(first[0])
        list_keys(second[1])

        async def is_off() -> bool:
            return not await works(first[0])

        await wait_until(is_off, PATIENCE_S, "the old key is refused")
        status, text = await chat_in_terminal(mesh.url, KVMESH_API_KEY=second[0])
        assert status == 0 and len(text.partition("> ")[2].split()) > 5, text
        status, text = await chat_in_terminal(mesh.url)
        assert status == 1 and "requires an API key" in text and "Traceback" not in text


async def key_and_entry() -> tuple[str, Any]:
    """Runs `kvmesh key`. Returns the key, and its entry for the list."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "key", "--tenant", "acme", "--priority-max", "5"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return err.decode().split()[-1], json.loads(out)


async def chat_in_terminal(url: str, **env: str) -> tuple[int | None, str]:
    """Runs `kvmesh chat` with two conversations of one line each."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "chat", "--url", url),
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(b"hello\n/new\nhello\n\n"), 60)
    return process.returncode, out.decode()
