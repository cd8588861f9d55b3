"""CPU of the frontend alone per streamed token: `python bench/frontend_stream.py [streams] [tokens] [step_ms] [--profile]`.

The frontend runs in this process with its real HTTP side and pipeline; below it a loop calls the sinks once per step, as
the link's reader does. The clients are another process.
"""

import asyncio
import cProfile
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvmesh.clock import SystemClock  # noqa: E402
from kvmesh.core import Ask, FinishReason, Placement, Usage, WorkerRef  # noqa: E402
from kvmesh.rpc.clients import DecodeLeg, LegFinish, LegSink, Placed  # noqa: E402
from kvmesh.telemetry import Instruments  # noqa: E402
from services.frontend.metrics import FrontendMetrics  # noqa: E402
from services.frontend.models import ServedModel, StaticModels  # noqa: E402
from services.frontend.openai.http import HttpServer  # noqa: E402
from services.frontend.pipeline import Pipeline  # noqa: E402
from services.frontend.settings import HttpSettings, PipelineSettings  # noqa: E402
from tests.frontend_mesh import served_model, write_model  # noqa: E402


class Stepper:
    """All legs get one token per step; also the router and the link."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.legs: dict[LegSink, int] = {}
        self.tokens = 0

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        worker = WorkerRef(worker_id="d", address="d:1")
        return Placed(ask_id=1, placement=Placement(reservation_id="r", decode=worker))

    def report_nowait(self, *_: object, **__: object) -> None:
        pass

    async def link(self, worker: WorkerRef, *, timeout_s: float) -> "Stepper":
        return self

    def submit_nowait(self, leg: DecodeLeg, sink: LegSink) -> Callable[[], None]:
        self.legs[sink] = leg.generation.sampling.max_tokens or 1

        def cancel() -> None:
            self.legs.pop(sink, None)

        return cancel

    async def run(self) -> None:
        token = (50,)
        while True:
            await asyncio.sleep(self.step_s)
            came_s = asyncio.get_running_loop().time()
            for sink, left in list(self.legs.items()):
                if sink not in self.legs:
                    continue
                sink.on_tokens(token, None, came_s)
                self.tokens += 1
                if left == 1:
                    del self.legs[sink]
                    sink.on_finish(LegFinish(reason=FinishReason.LENGTH, usage=Usage()))
                else:
                    self.legs[sink] = left - 1


CLIENT = """
import asyncio, json, sys, uvloop
port, streams, requests, tokens = map(int, sys.argv[1:])
body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "stream": True,
                   "max_tokens": tokens, "ignore_eos": True}).encode()
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    for _ in range(requests):
        writer.write(head + body)
        await reader.readuntil(b"[DONE]\\n\\n\\r\\n0\\r\\n\\r\\n")
    writer.close()
async def main():
    await asyncio.gather(*(one() for _ in range(streams)))
uvloop.run(main())
"""


async def main(streams: int, tokens: int, step_s: float, requests: int) -> tuple[float, int, float]:
    """CPU seconds of this process, tokens, wall seconds."""
    with tempfile.TemporaryDirectory() as directory:
        model: ServedModel = served_model(write_model(Path(directory)), context_tokens_max=1_000_000)
    stepper = Stepper(step_s)
    registry = CollectorRegistry()
    pipeline = Pipeline(
        models=StaticModels([model]),
        prefill=None,  # type: ignore[arg-type]
        links=stepper,
        router=stepper,
        clock=SystemClock(),
        generator=random.Random(1),
        metrics=FrontendMetrics(Instruments(registry, "frontend")),
        settings=PipelineSettings(),
    )
    server = HttpServer(pipeline, HttpSettings(port=0), registry)
    await server.start()
    running = asyncio.create_task(stepper.run())
    running.add_done_callback(lambda task: None if task.cancelled() else task.result())
    began, cpu = time.perf_counter(), time.process_time()
    arguments = [str(each) for each in (server.port, streams, requests, tokens)]
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *arguments)
    assert await client.wait() == 0
    used, wall = time.process_time() - cpu, time.perf_counter() - began
    running.cancel()
    await server.aclose()
    return used, stepper.tokens, wall


if __name__ == "__main__":
    numbers = [float(each) for each in sys.argv[1:] if not each.startswith("-")]
    count, length, step_ms = [*numbers, *[32.0, 128.0, 6.0][len(numbers) :]]
    repeats = max(1, int(60_000 / (count * length)))
    profile = cProfile.Profile() if "--profile" in sys.argv else None
    if profile is not None:
        profile.enable()
    seconds, total, took_s = uvloop.run(main(int(count), int(length), step_ms / 1000, repeats))
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    line = {"streams": count, "tokens": total, "step_ms": step_ms, "cpu_us_per_token": round(1e6 * seconds / total, 2)}
    print(json.dumps({**line, "wall_s": round(took_s, 2), "cpu_s": round(seconds, 2)}))
