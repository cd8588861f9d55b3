"""Runs the examples as users do, against a mesh of simulated engines."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.client import AsyncClient, ClientSettings, Constraint, ConstraintKind, Options, SamplingParams
from kvmesh.core import FinishReason
from tests.integration.mesh import ROOT, RunningMesh, argv_simulated, grpc_address, running_mesh
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RunningMesh, str]]:
    state = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    # If a busy machine delays one decode worker, the other one answers.
    argv = argv_simulated("--prefill", "1", "--decode", "2")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv, env=state) as running:
        yield running, (await grpc_address(running))[0]


async def run(*command: str) -> tuple[int, str, str]:
    """Runs a command. Returns its status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 2 * PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_python_clients(mesh: tuple[RunningMesh, str]) -> None:
    """The examples print a stream with its usage, batches, and a forced call with JSON arguments. An unknown model gives an error without a
    stack trace."""
    status, out, err = await run(sys.executable, "examples/client.py", mesh[1])
    assert status == 0, err
    assert "models: demo" in out and "-> Hello, mesh" in out and " tokens in, 24 out" in out
    answers = [line.partition(": ...")[0] for line in out.splitlines() if line.startswith("batch: ")]
    assert sorted(answers) == ["batch: cat 200", "batch: horse 200", "batch: rabbit 200"]
    call = next(line for line in out.splitlines() if line.startswith("tool call: "))
    assert call.split()[2] == "get_weather" and "city" in json.loads(call.split(maxsplit=3)[3])
    status, out, err = await run(sys.executable, "examples/async_client.py", mesh[1])
    assert status == 0, err
    assert out.count("begun:") == 3 and "whole:" in out
    status, _, err = await run(sys.executable, "examples/client.py", mesh[1], "absent")
    assert (status, "model_not_found" in err, "Traceback" in err) == (1, True, False)


async def test_reflection(mesh: tuple[RunningMesh, str]) -> None:
    """Clients without generated code can list services and methods, read a stream, and get typed errors."""
    status, out, err = await run("sh", "examples/grpc.sh", mesh[1])
    assert status == 0, err
    for service in ("kvmesh.inference.v1.InferenceService", "inference.GRPCInferenceService", "grpc.health.v1.Health"):
        assert service in out.splitlines()
    assert "Generate(kvmesh.inference.v1.GenerateRequest) returns (stream kvmesh.inference.v1.GenerateResponse)" in out
    messages = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert any(each.get("usage", {}).get("output_tokens") == 8 for each in messages)
    assert messages[-1] == {"ready": True}
    call = (sys.executable, "examples/grpc_call.py", mesh[1], "kvmesh.inference.v1.InferenceService/Generate")
    status, _, err = await run(*call, '{"model": "absent", "text": "x"}')
    assert (status, err.startswith("NOT_FOUND")) == (1, True)
    status, _, err = await run(*call, '{"wibble": 1}')
    assert (status, "wibble" in err, "Traceback" in err) == (2, True, False)


async def test_curl(mesh: tuple[RunningMesh, str]) -> None:
    """The curl example works over HTTP without a client library."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    status, out, err = await run("sh", "examples/curl.sh", mesh[0].url)
    assert status == 0, err + out
    assert "data: [DONE]" in out and '    "data": [\n' in out and ": completed\n" in out
    assert [line.partition(":")[0] for line in out.splitlines() if ": ..." in line] == ["cat", "rabbit", "horse"]


async def test_the_client_against_real_processes(mesh: tuple[RunningMesh, str]) -> None:
    """The client's features on simulated engines beyond text: embeddings, log-probabilities of prompts, schemas and forced calls."""
    sampling = SamplingParams(max_tokens=64, logprobs=2, prompt_logprobs=1)
    schema = '{"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}'
    shaped = SamplingParams(max_tokens=200, constraint=Constraint(kind=ConstraintKind.JSON_SCHEMA, text=schema))
    tool = {"type": "function", "function": {"name": "look", "parameters": json.loads(schema)}}
    question = [{"role": "user", "content": "Which city?"}]
    async with AsyncClient(mesh[1], ClientSettings(timeout_s=PATIENCE_S)) as client:
        found = await client.embed("demo", ["one text", "another"], dimensions=16)
        assert [len(vector) for vector in found.vectors] == [16, 16] and found.usage.prompt_tokens > 0
        token_ids = await client.tokenize("demo", "one text")
        assert (await client.embed("demo", [token_ids], dimensions=16)).vectors[0] == pytest.approx(found.vectors[0])
        answer = await client.generate("demo", "one text", sampling=sampling, options=Options(choices=2), echoes=True)
        for choice in answer.choices:
            assert choice.text.startswith("one text") and len(choice.prompt_logprobs or ()) == len(token_ids) - 1
            assert choice.logprobs and all(len(each.alternatives) == 2 for each in choice.logprobs)
        answer = await client.chat("demo", question, sampling=shaped)
        assert json.loads(answer.choices[0].text)["city"] in ("Rome", "Paris")
        answer = await client.chat("demo", question, tools=[tool], tool_choice="required")
        assert answer.choices[0].finish_reason is FinishReason.TOOL_CALLS
        assert all(json.loads(call.arguments)["city"] in ("Rome", "Paris") for call in answer.choices[0].tool_calls)
