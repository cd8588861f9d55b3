"""Measures CPU per streamed token of the frontend alone: `python bench/frontend_stream.py [streams] [tokens] [step_ms] [--profile]`.

The frontend's HTTP server and pipeline run in this process. A loop calls the sinks once per step, as the link's reader does. The clients run in
another process. `--logprobs N` requests N alternatives per token, `--completions` uses that endpoint. `--ratio` prints the cost of streams with
log-probabilities relative to streams without. Meanwhile another client requests single tokens; each line has its time to first token.
"""

import argparse
import asyncio
import cProfile
import json
import os
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
from kvmesh.core import (  # noqa: E402
    Ask,
    FinishReason,
    Leg,
    LegFinish,
    LegTask,
    Placement,
    Role,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.rpc.clients import LegSink, Placed  # noqa: E402
from kvmesh.rpc.codec.types import from_logprobs, to_logprobs  # noqa: E402
from kvmesh.telemetry import Instruments  # noqa: E402
from services.frontend.api.http.server import HttpServer  # noqa: E402
from services.frontend.metrics import FrontendMetrics  # noqa: E402
from services.frontend.models import ServedModel  # noqa: E402
from services.frontend.pipeline.pipeline import Pipeline  # noqa: E402
from services.frontend.settings import HttpSettings, PipelineSettings  # noqa: E402
from tests.frontend_mesh import StaticModels, served_model, write_model  # noqa: E402

TOKENS = tuple(range(262, 350))
"""Generated tokens, in a cycle. Alternatives are random tokens of the vocabulary."""


class Stepper:
    """Sends every leg one token per step. Acts as the router and the link too."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.legs: dict[LegSink, Leg] = {}
        self.left: dict[LegSink, int] = {}
        self.tokens = 0
        self.tasks = (LegTask.GENERATE,)
        self.worker = WorkerRef(worker_id="d", address="d:1")
        self._random = random.Random(1)
        self._entries: dict[int, list[object]] = {}

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        worker = WorkerRef(worker_id="d", address="d:1")
        return Placed(ask_id=1, placement=Placement(reservation_id="r", decode=worker))

    def report_nowait(self, *_: object, **__: object) -> None:
        pass

    async def link(self, worker: WorkerRef, role: Role, *, timeout_s: float, waits_for_lost: bool = True) -> "Stepper":
        self.worker = worker
        return self

    def release_nowait(self, handle_id: str) -> None:
        pass

    def submit_nowait(self, leg: Leg, sink: LegSink, *, timeout_s: float) -> Callable[[], None]:
        self.legs[sink] = leg
        self.left[sink] = leg.generation.sampling.max_tokens or 1

        def cancel() -> None:
            self.legs.pop(sink, None)

        return cancel

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            came_s = asyncio.get_running_loop().time()
            for sink, leg in list(self.legs.items()):
                if sink not in self.legs:
                    continue
                token = TOKENS[self.tokens % len(TOKENS)]
                count = leg.generation.sampling.logprobs
                sink.on_tokens((token,), None if count is None else self._logprobs(count), came_s)
                self.tokens += 1
                self.left[sink] -= 1
                if not self.left[sink]:
                    del self.legs[sink], self.left[sink]
                    sink.on_finish(LegFinish(reason=FinishReason.LENGTH, usage=Usage()))

    def _logprobs(self, count: int) -> list[TokenLogprob]:
        """Decodes a prepared message, as the link does."""
        if count not in self._entries:
            self._entries[count] = [to_logprobs([self._entry(count)]) for _ in range(997)]
        return from_logprobs(self._entries[count][self.tokens % 997])  # type: ignore[arg-type]

    def _entry(self, count: int) -> TokenLogprob:
        pairs = tuple((self._random.randrange(5, 400), -self._random.random() - i) for i in range(count))
        return TokenLogprob(logprob=-self._random.random(), alternatives=pairs)


CLIENT = """
import asyncio, json, sys, time, uvloop
port, streams, requests, tokens, logprobs = map(int, sys.argv[1:6])
path = sys.argv[6]
chat = path.endswith("chat/completions")
asks = {} if logprobs < 0 else {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
def request(**more):
    what = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    body = json.dumps({"model": "tiny", "stream": True, "ignore_eos": True, **what, **more}).encode()
    head = f"POST {path} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Type: application/json\\r\\n"
    return f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body
async def one(data, count):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    times = []
    while len(times) != count:
        began = time.perf_counter()
        writer.write(data)
        await reader.readuntil(b"data: ")
        times.append(time.perf_counter() - began)
        while not (await reader.readuntil(b"\\n")).startswith(b"data: [DONE]"):
            pass
        await reader.readuntil(b"0\\r\\n\\r\\n")
        if count < 0 and done:
            return times
    writer.close()
done = False
async def main():
    global done
    other = asyncio.create_task(one(request(max_tokens=1), -1))
    await asyncio.gather(*(one(request(max_tokens=tokens, **asks), requests) for _ in range(streams)))
    done = True
    print(json.dumps(sorted(await other)))
uvloop.run(main())
"""


async def main(
    *, streams: int, tokens: int, step_s: float, requests: int, logprobs: int, path: str
) -> dict[str, float]:
    """Runs one measurement and returns the line to print."""
    with tempfile.TemporaryDirectory() as directory:
        model: ServedModel = served_model(write_model(Path(directory)), context_tokens_max=1_000_000)
    stepper = Stepper(step_s)
    registry = CollectorRegistry()
    pipeline = Pipeline(
        models=StaticModels([model]),
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
    began, cpu, before = time.perf_counter(), time.process_time(), os.times()
    arguments = [*(str(each) for each in (server.port, streams, requests, tokens, logprobs)), path]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await client.communicate()
    assert client.returncode == 0
    others = json.loads(output)
    used, wall, after = time.process_time() - cpu, time.perf_counter() - began, os.times()
    running.cancel()
    await server.aclose()
    return {
        "streams": streams,
        "logprobs": logprobs,
        "tokens": stepper.tokens,
        "step_ms": step_s * 1000,
        "cpu_us_per_token": round(1e6 * used / stepper.tokens, 2),
        "of_it_system_us": round(1e6 * (after.system - before.system) / stepper.tokens, 2),
        "tokens_per_s": round(stepper.tokens / wall),
        "busy": round(used / wall, 2),
        "others_ttft_p50_ms": round(1000 * others[len(others) // 2], 1),
    }


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("streams", nargs="?", type=int, default=32)
    parser.add_argument("tokens", nargs="?", type=int, default=128)
    parser.add_argument("step_ms", nargs="?", type=float, default=6.0)
    parser.add_argument("--logprobs", type=int, default=-1, help="alternatives per token; -1: no log-probabilities")
    parser.add_argument("--completions", action="store_true")
    parser.add_argument("--ratio", action="store_true", help="run without and with log-probabilities (default 5)")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def run(asked: argparse.Namespace, logprobs: int) -> dict[str, float]:
    repeats = max(1, int(60_000 / (asked.streams * asked.tokens)))
    path = "/v1/completions" if asked.completions else "/v1/chat/completions"
    line = uvloop.run(
        main(
            streams=asked.streams,
            tokens=asked.tokens,
            step_s=asked.step_ms / 1000,
            requests=repeats,
            logprobs=logprobs,
            path=path,
        )
    )
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    asked = arguments_of()
    profile = cProfile.Profile() if asked.profile else None
    if profile is not None:
        profile.enable()
    if asked.ratio:
        plain, detailed = run(asked, -1), run(asked, asked.logprobs if asked.logprobs >= 0 else 5)
        ratio = detailed["cpu_us_per_token"] / plain["cpu_us_per_token"]
        print(json.dumps({"cpu_with_logprobs_over_without": round(ratio, 2)}))
    else:
        run(asked, asked.logprobs)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
