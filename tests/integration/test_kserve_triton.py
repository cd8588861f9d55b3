"""KServe v2 with Triton's own Python client, synchronous and asyncio, against a mesh of simulated engines."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.mesh import (
    ROOT,
    RunningMesh,
    argv_simulated,
    grpc_address,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.integration.mesh import metrics_text as metrics_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "one two three"
MODEL = "demo"


async def drive(mesh: RunningMesh) -> dict[str, Any]:
    """Runs Triton's client against a mesh and returns its results, once nothing is in flight."""
    pytest.importorskip("tritonclient")
    address, metrics_port = await grpc_address(mesh)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.triton_drive", address, MODEL),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 2 * PATIENCE_S)
    assert process.returncode == 0, errors.decode()[-3000:] + mesh.logs()

    async def is_idle() -> bool:
        text = await metrics_of("127.0.0.1", metrics_port)
        assert "kvmesh_frontend_inflight_requests" in text
        return worker_metric(text, "kvmesh_frontend_inflight_requests") == 0

    await wait_until(is_idle, PATIENCE_S, "a request was left in flight")
    found: dict[str, Any] = json.loads(output)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    """The results of the client."""
    # If a busy machine delays one decode worker, the other one answers.
    argv = argv_simulated("--prefill", "1", "--decode", "2", "--engine-args=--simulated-time-factor 1")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as mesh:
        yield await drive(mesh)


async def test_server_and_model_status(seen: dict[str, Any]) -> None:
    """The server is live and ready and has metadata. An unknown model is not ready, and its metadata is NOT_FOUND."""
    about = seen["about"]
    assert (about["live"], about["ready"], about["server"]) == (True, True, "kvmesh")
    assert (about["model_ready"], about["others_ready"]) == ([True, True], [False, False])
    assert {"text_input", "stream", "sampling_parameters"} <= set(about["inputs"])
    assert "text_output" in about["outputs"]
    assert about["absent"][0] == "StatusCode.NOT_FOUND"


async def test_configuration(seen: dict[str, Any]) -> None:
    """Clients such as perf_analyzer read the tensors and whether a request may have several responses."""
    config = seen["about"]["config"]
    inputs = {each["name"]: each for each in config["input"]}
    assert config["name"] == MODEL and config["model_transaction_policy"] == {"decoupled": True}
    assert inputs["text_input"]["data_type"] == "TYPE_STRING" and not inputs["text_input"].get("optional")
    assert inputs["stream"]["data_type"] == "TYPE_BOOL" and inputs["stream"]["optional"]
    assert {"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"]} in config["output"]
    assert seen["about"]["absent_config"][0] == "StatusCode.NOT_FOUND"


async def test_statistics(seen: dict[str, Any]) -> None:
    """An answered request is counted with its duration. A request that is refused before it runs is not counted."""
    before, after = seen["statistics"]["before"], seen["statistics"]["after"]
    assert int(after["inference_count"]) == int(before["inference_count"]) + 1 == int(after["execution_count"])
    success = {name: int(before["inference_stats"]["success"][name]) for name in ("count", "ns")}
    assert int(after["inference_stats"]["success"]["count"]) == success["count"] + 1
    assert int(after["inference_stats"]["success"]["ns"]) > success["ns"]
    # The asyncio client cancelled a stream.
    assert int(after["inference_stats"]["fail"]["count"]) >= 1
    assert int(after["last_inference"]) >= int(before["last_inference"]) > 0
    assert seen["statistics"]["all"] == [MODEL]
    assert seen["statistics"]["absent"][0] == "StatusCode.NOT_FOUND"


async def test_one_answer(seen: dict[str, Any]) -> None:
    """The text begins with the prompt unless it is excluded. Choices, counts and finish reasons are separate tensors."""
    unary = seen["unary"]
    assert unary["id"] == "r1"
    (whole,) = unary["whole"]
    assert whole.startswith(TEXT) and len(whole) > len(TEXT)
    assert len(unary["text"]) == 2 and all(text and not text.startswith(TEXT) for text in unary["text"])
    assert unary["finish"] == ["length", "length"]
    assert unary["counts"][0][0] > 0 and unary["counts"][1] == [4, 4]
    assert unary["only"] == ["finish_reason"]


async def test_errors_of_one_answer(seen: dict[str, Any]) -> None:
    """Errors have the right status, and a message that names the tensor or parameter."""
    errors = seen["unary"]["errors"]
    wanted = {
        "model": ("NOT_FOUND", "absent"),
        "temperature": ("INVALID_ARGUMENT", "parameters.temperature"),
        "unknown": ("INVALID_ARGUMENT", "parameters.wibble"),
        "stream": ("FAILED_PRECONDITION", "stream"),
        "twice": ("INVALID_ARGUMENT", "parameters.max_tokens"),
        "tensor": ("INVALID_ARGUMENT", "inputs.text_input"),
    }
    for name, (status, words) in wanted.items():
        assert errors[name][0] == f"StatusCode.{status}" and words in errors[name][1], (name, errors[name])
    assert "DEADLINE_EXCEEDED" in errors["deadline"][0] or "deadline" in errors["deadline"][1].lower()


async def test_a_stream_answers_each_request_independently(seen: dict[str, Any]) -> None:
    """Each response has the id of its request, and the last one is marked. An invalid request does not end the stream."""
    streaming = seen["streaming"]
    by_id: dict[str, list[Any]] = {}
    for call_id, texts, final, error in streaming["mixed"]:
        by_id.setdefault(call_id, []).append((texts, final, error))
    assert [final for _, final, _ in by_id["a"]] == [False] * (len(by_id["a"]) - 1) + [True]
    assert len(by_id["a"]) > 2 and by_id["a"][-1][0] is not None
    assert by_id["b"][-1] == (None, True, None) and all(texts for texts, _, _ in by_id["b"][:-1])
    assert len(by_id["c"]) == 1 and by_id["c"][0][1] is True and by_id["c"][0][0][0].startswith(TEXT)
    assert "parameters.temperature" in by_id[""][0][2]
    assert streaming["after"][-1][:1] == ["e"]
    assert streaming["strict"][0] == "StatusCode.INVALID_ARGUMENT"


async def test_the_asyncio_client(seen: dict[str, Any]) -> None:
    """The asyncio client gets the same results. Its cancelled stream leaves nothing in flight, which the fixture checks."""
    asynchronous = seen["asynchronous"]
    assert asynchronous["whole"][0].startswith(TEXT)
    assert len([piece for piece in asynchronous["pieces"] if piece]) > 1
    assert asynchronous["cancelled"]
