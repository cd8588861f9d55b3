"""Counts the functions between the socket and the router: `python -m bench.request_path [--list]`.

One streaming chat request runs through the frontend's HTTP server and pipeline in this process. The script records the product functions
(`kvmesh/` and `services/`) that are called from the first byte until the pipeline asks the router for a placement. It prints them in the order
of their first calls. An earlier request warms up, so that functions which only the first request calls are not counted. Comprehensions and
generator expressions do not count as functions.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

import aiohttp
from prometheus_client import CollectorRegistry

from kvmesh.clock import SystemClock
from kvmesh.telemetry import Instruments
from services.frontend.api.http.server import HttpServer
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings, PipelineSettings
from tests.frontend_mesh import FakeMesh, StaticModels, served_model, tokens_of, write_model

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (f"{ROOT}/kvmesh/", f"{ROOT}/services/")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4}


class CallTrace:
    """Records the product functions that this thread calls, in the order of their first calls, until `stop_at` is called."""

    def __init__(self, stop_at: CodeType) -> None:
        self._stop_at = stop_at
        self.found: dict[CodeType, None] = {}

    def start(self) -> None:
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is self._stop_at:
            sys.setprofile(None)
        elif event == "call" and code.co_filename.startswith(PRODUCT) and not code.co_name.startswith("<"):
            self.found.setdefault(code)


async def trace_request(model_directory: Path) -> list[CodeType]:
    """Returns the functions of the second of two requests."""
    model = served_model(write_model(model_directory))
    mesh = FakeMesh(lambda _: tokens_of(model.text, "a few words"))
    registry, clock = CollectorRegistry(), SystemClock()
    pipeline = Pipeline(
        models=StaticModels([model]),
        links=mesh,
        router=mesh,
        clock=clock,
        generator=random.Random(1),
        metrics=FrontendMetrics(Instruments(registry, "frontend")),
        settings=PipelineSettings(),
    )
    server = HttpServer(pipeline, HttpSettings(host="127.0.0.1", port=0), registry)
    await server.start()
    trace = CallTrace(stop_at=FakeMesh.place.__code__)
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
            for is_traced in (False, True):
                if is_traced:
                    trace.start()
                async with session.post(url, json=BODY) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
    finally:
        sys.setprofile(None)
        await server.aclose()
    return list(trace.found)


def main() -> int:
    """Prints the functions and their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each function")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(trace_request(Path(directory)))
    if options.list:
        for code in found:
            print(f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno} {code.co_qualname}")
    files = {code.co_filename for code in found}
    print(f"{len(found)} functions in {len(files)} files between the socket and the router")
    return 0


if __name__ == "__main__":
    sys.exit(main())
