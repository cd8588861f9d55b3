"""Drives a frontend with Triton's Python client: `python -m tests.triton_drive ADDRESS MODEL` prints the results as JSON.

It runs in a separate process, because the generated code of tritonclient and of kvmesh both define the package `inference`, and protobuf accepts
each message name only once per process.
"""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.patience import PATIENCE_S

TEXT = "one two three"
LONG_TOKENS = 1000
"""A stream of so many takes more than four seconds. A response has all tokens since the previous one, so that a stream that is shorter than a
pause of the frontend may have only one."""


def tensor(name: str, value: Any, datatype: str = "BYTES") -> triton.InferInput:
    """Returns a tensor with one element."""
    kinds = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=kinds[datatype]))
    return made


def texts(result: Any, name: str = "text_output") -> list[str] | None:
    found = result.as_numpy(name)
    return None if found is None else [each.decode() for each in found]


def ask(stream: bool | None = None, **sampling: Any) -> list[triton.InferInput]:
    inputs = [tensor("text_input", TEXT)]
    if stream is not None:
        inputs.append(tensor("stream", stream, "BOOL"))
    if sampling:
        inputs.append(tensor("sampling_parameters", json.dumps(sampling)))
    return inputs


def failure(call: Any, *args: Any, **kwargs: Any) -> list[str]:
    try:
        call(*args, **kwargs)
    except InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return []


def about(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    """Returns health, metadata and configuration of the server."""
    metadata = client.get_model_metadata(model)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [client.is_model_ready(model), client.is_model_ready(model, "1")],
        "others_ready": [client.is_model_ready("absent"), client.is_model_ready(model, "7")],
        "server": client.get_server_metadata().name,
        "inputs": [each.name for each in metadata.inputs],
        "outputs": [each.name for each in metadata.outputs],
        "absent": failure(client.get_model_metadata, "absent"),
        "config": client.get_model_config(model, as_json=True)["config"],
        "absent_config": failure(client.get_model_config, "absent"),
    }


def statistics(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    """Statistics before and after an answer and a failure that comes while the request runs."""

    def of_model() -> dict[str, Any]:
        (found,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
        return dict(found)

    before = of_model()
    client.infer(model, ask(max_tokens=2))
    failure(client.infer, model, ask(max_tokens=2), outputs=[triton.InferRequestedOutput("absent")])
    return {
        "before": before,
        "after": of_model(),
        "all": [each["name"] for each in client.get_inference_statistics(as_json=True)["model_stats"]],
        "absent": failure(client.get_inference_statistics, "absent"),
    }


def unary(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    """ModelInfer: sampling parameters as a tensor and as request parameters, optional outputs, and errors."""
    whole = client.infer(model, ask(max_tokens="4", temperature="0"), request_id="r1")
    flags = [
        tensor(f"return_{name}", True, "BOOL") for name in ("finish_reason", "num_input_tokens", "num_output_tokens")
    ]
    result = client.infer(
        model,
        [*ask(), tensor("exclude_input_in_output", True, "BOOL"), tensor("max_tokens", 4, "INT32"), *flags],
        parameters={"temperature": 0.0, "seed": 7, "n": 2, "stop": "none of it"},
    )
    return {
        "id": whole.get_response().id,
        "whole": texts(whole),
        "text": texts(result),
        "finish": texts(result, "finish_reason"),
        "counts": [result.as_numpy("num_input_tokens").tolist(), result.as_numpy("num_output_tokens").tolist()],
        "only": [each.name for each in client.infer(
            model, ask(max_tokens=2), outputs=[triton.InferRequestedOutput("finish_reason")]
        ).get_response().outputs],
        "errors": {
            "model": failure(client.infer, "absent", ask()),
            "temperature": failure(client.infer, model, ask(temperature=9)),
            "unknown": failure(client.infer, model, ask(), parameters={"wibble": 1}),
            "stream": failure(client.infer, model, ask(stream=True)),
            "twice": failure(client.infer, model, ask(max_tokens=3), parameters={"max_tokens": 3}),
            "tensor": failure(client.infer, model, [tensor("stream", False, "BOOL")]),
            "deadline": failure(client.infer, model, ask(max_tokens=1900), client_timeout=0.05),
        },
    }  # fmt: skip


def collect(answers: "queue.Queue[Any]", requests: int) -> list[Any]:
    """Reads until each request has its final response or its error."""
    found, open_requests = [], requests
    while open_requests:
        result, error = answers.get(timeout=PATIENCE_S)
        if error is not None:
            found.append(["", None, None, str(error.message())])
            open_requests -= 1
            continue
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        found.append([response.id, texts(result), final, None])
        open_requests -= final
    return found


def streaming(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    """Calls ModelStreamInfer with callbacks in a thread: several concurrent requests on one stream, one of them invalid."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, ask(stream=True, max_tokens=LONG_TOKENS), request_id="a")
    client.async_stream_infer(model, ask(stream=True, max_tokens=5), request_id="b", enable_empty_final_response=True)
    client.async_stream_infer(model, ask(stream=False, max_tokens=5), request_id="c")
    client.async_stream_infer(model, ask(stream=True, temperature=9), request_id="d")
    mixed = collect(answers, 4)
    client.async_stream_infer(model, ask(stream=True, max_tokens=2), request_id="e")
    after = collect(answers, 1)
    client.stop_stream()
    client.start_stream(
        callback=lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"}
    )
    client.async_stream_infer(model, ask(stream=True, temperature=9), request_id="f")
    _, strict = answers.get(timeout=PATIENCE_S)
    client.stop_stream()
    return {"mixed": mixed, "after": after, "strict": [str(strict.status()), str(strict.message())]}


async def asynchronous(address: str, model: str) -> dict[str, Any]:
    """Uses the asyncio client for one unary call, one stream, and one stream that it cancels."""
    async with triton_aio.InferenceServerClient(address) as client:
        whole = await client.infer(model, ask(max_tokens=4))

        async def requests() -> Any:
            yield {"model_name": model, "inputs": ask(stream=True, max_tokens=LONG_TOKENS), "request_id": "g"}

        pieces = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            pieces.append(texts(result)[0])

        async def endless() -> Any:
            yield {"model_name": model, "inputs": ask(stream=True, max_tokens=1900), "request_id": "h"}

        answers = client.stream_infer(endless())
        _, error = await anext(aiter(answers))
        assert error is None, error
        is_cancelled = answers.cancel()
    return {"whole": texts(whole), "pieces": pieces, "cancelled": is_cancelled}


def main() -> None:
    address, model = sys.argv[1:]
    with triton.InferenceServerClient(address) as client:
        results = {
            "about": about(client, model),
            "unary": unary(client, model),
            "streaming": streaming(client, model),
            "asynchronous": asyncio.run(asynchronous(address, model)),
            "statistics": statistics(client, model),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
