"""Compares a real mesh with a simulated one that takes its step times from a profile of the real one.

python -m bench.profile_check --engine vllm --dir /tmp/check

A round takes two minutes: it profiles the engine through a mesh and puts a load on that mesh. After the last round it puts the same load on a
mesh of simulated engines, whose times are fitted to the points of all rounds. Prints TTFT and ITL percentiles of both meshes. A machine whose
speed varies from minute to minute needs several rounds. The target is a difference of at most 15 %.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import aiohttp
import orjson

from bench.table import render
from kvmesh.cli.profile.command import simulated_flags, summary_of
from kvmesh.cli.profile.sweep import refitted
from kvmesh.core.engine_profile import EngineProfile, read_engine_profile, to_text

Latencies = tuple[list[float], list[float]]
WARM_UP = 20
START_TIMEOUT_S = 180.0
PERCENTILES = (0.5, 0.9, 0.95)
WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon".split()
)


@contextmanager
def mesh(folder: Path, *flags: str) -> Iterator[str]:
    """Starts a mesh of processes and yields its URL. Ends it on exit."""
    log, state = folder / "up.txt", folder / "mesh.json"
    command = [
        sys.executable,
        "-m",
        "kvmesh.cli",
        "up",
        "--port",
        "0",
        "--run-dir",
        str(folder),
        "--greeting",
        "",
        "--no-planner",
        *flags,
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "KVMESH_STATE": str(state)})
    try:
        until_s = time.monotonic() + START_TIMEOUT_S
        while not state.exists() or not orjson.loads(state.read_bytes()).get("url"):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the mesh did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield str(orjson.loads(state.read_bytes())["url"])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def profile(folder: Path, options: argparse.Namespace) -> EngineProfile:
    """Runs `kvmesh profile` on the mesh in the folder."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "kvmesh.cli", "profile", "--out", str(path), *options.profile_flags.split()]
    subprocess.run(command, check=True, env={**os.environ, "KVMESH_STATE": str(folder / "mesh.json")}, timeout=300)
    return read_engine_profile(path.read_bytes(), field="profile")


async def put_load(url: str, options: argparse.Namespace, *, requests: int, seed: int) -> Latencies:
    """Sends prompts of random words with Poisson arrivals. Returns TTFT and mean times per later token."""
    generator, ttft_s, itl_s = Random(seed), list[float](), list[float]()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(requests):
            words = " ".join(generator.choices(WORDS, k=round(generator.uniform(0.3, 1.7) * options.prompt_words)))
            tokens = max(4, round(generator.uniform(0.3, 1.7) * options.output_tokens))
            group.create_task(_ask(session, url=url, words=words, tokens=tokens, ttft_s=ttft_s, itl_s=itl_s))
            await asyncio.sleep(generator.expovariate(options.rate))
    return ttft_s, itl_s


async def _ask(
    session: aiohttp.ClientSession, *, url: str, words: str, tokens: int, ttft_s: list[float], itl_s: list[float]
) -> None:
    body = {
        "model": "check",
        "prompt": words,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    began_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        arrivals = [
            time.perf_counter()
            async for line in response.content
            if line.startswith(b"data: {") and orjson.loads(line[6:]).get("choices")
        ]
    ttft_s.append(arrivals[0] - began_s)
    itl_s.append((arrivals[-1] - arrivals[0]) / (tokens - 1))


def compare(rounds: Sequence[Latencies], simulated: Latencies) -> str:
    """Returns a table of percentiles: the real mesh over all rounds, the simulated mesh, and the real mesh in each round."""
    rows = []
    for place, name in enumerate(("TTFT", "ITL")):
        for share in PERCENTILES:
            real_s = _percentile([value for each in rounds for value in each[place]], share)
            simulated_s = _percentile(simulated[place], share)
            alone = ", ".join(f"{1000 * _percentile(each[place], share):.0f}" for each in rounds)
            rows.append(
                (
                    f"{name} p{round(100 * share)}",
                    f"{1000 * real_s:.1f}",
                    f"{1000 * simulated_s:.1f}",
                    f"{simulated_s / real_s:.2f}",
                    alone,
                )
            )
    return render(("", "real ms", "simulated ms", "simulated / real", "real ms of each round"), rows)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    rounds = [run_real(options) for _ in range(options.rounds)]
    profiles = [found for found, _ in rounds]
    found = refitted(
        replace(
            profiles[0],
            prefill=tuple(point for each in profiles for point in each.prefill),
            decode=tuple(point for each in profiles for point in each.decode),
        )
    )
    (options.dir / "profile.json").write_text(to_text(found))
    print(summary_of(found), compare([real for _, real in rounds], run_simulated(found, options)), sep="\n")
    return 0


def run_real(options: argparse.Namespace) -> tuple[EngineProfile, Latencies]:
    """Profiles an engine, and measures the mesh of this engine under load."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-check-") as folder:
        flags = ("--engine", options.engine, *_shared(options), f"--engine-args={options.engine_args}")
        with mesh(Path(folder), *flags) as url:
            return profile(Path(folder), options), _measure(url, options)


def run_simulated(found: EngineProfile, options: argparse.Namespace) -> Latencies:
    """Measures a mesh of simulated engines with the times of a profile."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-check-") as folder:
        times = f"--simulated-time-factor 1 {simulated_flags(found)}"
        with mesh(Path(folder), "--engine", "simulated", *_shared(options), f"--engine-args={times}") as url:
            return _measure(url, options)


def _measure(url: str, options: argparse.Namespace) -> Latencies:
    # Warms up code that compiles on first use. The prompts differ from the measured ones, so that no measured prompt is cached.
    asyncio.run(put_load(url, options, requests=WARM_UP, seed=1))
    return asyncio.run(put_load(url, options, requests=options.requests, seed=7))


def _shared(options: argparse.Namespace) -> Sequence[str]:
    return ("--model", options.model, "--served-name", "check", "--prefill", str(options.prefill))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.profile_check", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", type=Path, required=True, help="folder for the profiles")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / "models" / "demo"))
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--prefill", type=int, default=0, help="prefill workers; 0: one worker does both")
    parser.add_argument(
        "--profile-flags",
        default="--through frontend --prompt-tokens 64,128,256,512,800 --decode-batches 1,2,4 --contexts 128,512,800"
        " --decode-tokens 96 --repeats 4",
    )
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--prompt-words", type=int, default=150)
    parser.add_argument("--output-tokens", type=int, default=24)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
