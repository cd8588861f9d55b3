"""Tests of the load generator's pure parts and of the benchmarks' reports."""

import asyncio
import gzip
import json
import math
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import beside_commit, beside_engine
from bench.cancel import Side
from bench.figures import LoadReport, percentiles
from bench.generated_trace import generate_trace
from bench.loops import arrive, closed_loop, open_loop, poisson
from bench.medians import columns, compare, compare_quietest
from bench.noise import Noise
from bench.points import Point
from bench.prompts import PromptShape, make_prompts, one_token_words, trace_prompt
from bench.scenarios import Scenario
from bench.services import DEMO_MODEL
from bench.side_memory import MemoryResult
from bench.side_parts import PARTS, SHAPES, roomy_model, setups
from bench.side_tables import tables
from bench.table import render
from bench.target import LoadRequest, LoadResult
from kvmesh.core.whatif import RecordedRequest
from kvmesh.errors import MeshError
from services.whatif.traces import MOONCAKE_BLOCK_TOKENS, load_trace
from tests.patience import PATIENCE_S
from tests.worker_rig import running_worker, wait_until

MOONCAKE = [
    {"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [4, 9]},
    {"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [4]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,0,109
"""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_traces_load_in_order_of_time(tmp_path: Path, name: str) -> None:
    """Timestamps are converted from milliseconds to seconds and block ids are kept, for plain and for compressed files."""
    data = "".join(json.dumps(row) + "\n" for row in MOONCAKE).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert load_trace(tmp_path / name) == [
        RecordedRequest(at_s=0.0, prompt_tokens=512, output_tokens=7, block_ids=(4,)),
        RecordedRequest(at_s=3.0, prompt_tokens=700, output_tokens=20, block_ids=(4, 9)),
    ]


def test_azure_traces_load_with_offsets_from_their_first_row(tmp_path: Path) -> None:
    """Timestamps have seven decimal digits. An empty prompt counts as one token."""
    (tmp_path / "trace.csv").write_text(AZURE)
    first, second = load_trace(tmp_path / "trace.csv")
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)
    assert second.prompt_tokens == 1


def test_files_of_unknown_formats_are_refused(tmp_path: Path) -> None:
    """The loader rejects a file name with an unknown suffix instead of guessing the format."""
    (tmp_path / "trace.txt").write_text("")
    with pytest.raises(ValueError, match="neither"):
        load_trace(tmp_path / "trace.txt")


def test_percentiles_are_nearest_rank_in_milliseconds() -> None:
    """The 99th percentile of 1 to 100 seconds is the 99th value."""
    found = percentiles([float(i) for i in range(100, 0, -1)])
    assert found == {"p50": 50_000.0, "p90": 90_000.0, "p99": 99_000.0, "mean": 50_500.0}
    assert percentiles([]) == {}
    assert percentiles([0.25])["p99"] == 250.0


@given(st.lists(st.floats(min_value=0, max_value=1e3), min_size=1, max_size=300))
def test_percentiles_are_values_with_enough_below_them(values: list[float]) -> None:
    """At least the percentile's share of all values is at or below it, and less than that share is below it."""
    found = percentiles(values)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        at_or_below = sum(1000 * value <= found[name] for value in values)
        below = sum(1000 * value < found[name] for value in values)
        assert at_or_below >= share * len(values) - 1e-9
        assert below < share * len(values) + 1e-9


def test_prompts_have_their_length_are_distinct_and_repeat_with_the_seed() -> None:
    """Two runs with the same seed send the same prompts. No two prompts of a run have the same beginning."""
    shape = PromptShape(tokens=200)
    prompts = list(islice(make_prompts(shape, seed=3), 300))
    assert {len(prompt.split()) for prompt in prompts} == {200}
    assert len({tuple(prompt.split()[:8]) for prompt in prompts}) == 300
    assert prompts == list(islice(make_prompts(shape, seed=3), 300))
    assert prompts != list(islice(make_prompts(shape, seed=4), 300))


def test_prefix_groups_share_their_beginning_and_nothing_more() -> None:
    """Half of each prompt is one of four prefixes. The words after the prefix are different in every prompt."""
    shape = PromptShape(tokens=100, prefix_groups=4, prefix_share=0.5)
    prompts = [prompt.split() for prompt in islice(make_prompts(shape, seed=1), 200)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 4
    assert len({tuple(prompt[50:58]) for prompt in prompts}) == 200


def test_words_are_one_token_each_in_the_models_tokenizer() -> None:
    """A prompt of 500 words has 500 tokens, plus at most five for the first word, which no space precedes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompt = next(make_prompts(PromptShape(tokens=500), seed=1, words=one_token_words(DEMO_MODEL)))
    assert 500 <= len(tokenizer.encode(prompt, add_special_tokens=False).ids) <= 505


def test_a_traces_blocks_repeat_exactly_where_its_ids_do() -> None:
    """The same block ids give the same text, the text differs from the first different id on, and the prompt has the length in the trace."""
    first = trace_prompt(RecordedRequest(at_s=0, prompt_tokens=1200, output_tokens=1, block_ids=(7, 8, 9))).split()
    second = trace_prompt(RecordedRequest(at_s=5, prompt_tokens=1500, output_tokens=1, block_ids=(7, 8, 10))).split()
    shared = 2 * MOONCAKE_BLOCK_TOKENS
    assert (len(first), len(second)) == (1200, 1500)
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 8] != second[shared : shared + 8]


def test_scaled_blocks_repeat_too_and_requests_without_ids_share_nothing() -> None:
    """Scaling keeps the shared blocks. Requests without block ids get a distinct text, which is the same in each run."""
    blocks = [RecordedRequest(at_s=at, prompt_tokens=1024, output_tokens=1, block_ids=(7, at)) for at in (1, 2)]
    first, second = (trace_prompt(request, tokens_scale=0.1).split() for request in blocks)
    assert len(first) == len(second) == 102
    assert first[:51] == second[:51]
    assert first[51:60] != second[51:60]
    bare = [RecordedRequest(at_s=at, prompt_tokens=600, output_tokens=1) for at in (1.0, 2.0)]
    assert trace_prompt(bare[0]) == trace_prompt(bare[0])
    assert trace_prompt(bare[0]).split()[:8] != trace_prompt(bare[1]).split()[:8]


def _requests(count: int) -> Iterator[LoadRequest]:
    return (LoadRequest(prompt=str(i), output_tokens=1) for i in range(count))


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    """The gaps of 10 000 arrivals at 50/s have a mean and a standard deviation of 20 ms. The same seed gives the same arrivals."""
    offsets = [at_s for _, at_s in poisson(_requests(10_000), 50.0, seed=2)]
    gaps = [later - earlier for earlier, later in pairwise([0.0, *offsets])]
    assert mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert math.sqrt(mean([(gap - 0.02) ** 2 for gap in gaps])) == pytest.approx(0.02, rel=0.05)
    assert offsets == [at_s for _, at_s in poisson(_requests(10_000), 50.0, seed=2)]


def test_a_generated_trace_has_the_marginals_it_claims() -> None:
    """Rate, median lengths and the share of repeated blocks match their documented values."""
    trace = generate_trace(5000, rate_per_s=4.0, seed=1)
    assert 5000 / trace[-1].at_s == pytest.approx(4.0, rel=0.05)
    assert median(request.output_tokens for request in trace) == pytest.approx(350, rel=0.1)
    assert median(request.prompt_tokens for request in trace) == pytest.approx(7000, rel=0.1)
    for request in trace:
        full = MOONCAKE_BLOCK_TOKENS * len(request.block_ids)
        assert full - MOONCAKE_BLOCK_TOKENS < request.prompt_tokens <= full
    seen: set[int] = set()
    again = 0
    for request in trace:
        again += len(seen.intersection(request.block_ids))
        seen.update(request.block_ids)
    assert again / sum(len(request.block_ids) for request in trace) == pytest.approx(0.38, abs=0.03)
    assert trace == generate_trace(5000, rate_per_s=4.0, seed=1)


class CountingTarget:
    """Answers no request before `answers_from` of them are in flight, and records the number of requests in flight."""

    def __init__(self, answers_from: int) -> None:
        self._answers_from = answers_from
        self._answers = asyncio.Event()
        self.in_flight = self.most = 0
        self.intended_at_s: list[float] = []

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        self.intended_at_s.append(intended_at_s)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        if self.in_flight >= self._answers_from:
            self._answers.set()
        async with asyncio.timeout(PATIENCE_S):
            await self._answers.wait()
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        return LoadResult(output_tokens=1)

    async def aclose(self) -> None:
        pass


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    """The loop sends each request once and keeps exactly seven in flight."""
    target = CountingTarget(7)
    results = await closed_loop(target, _requests(50), concurrency=7)
    assert len(results) == 50
    assert target.most == 7


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The loop sends requests at their due times while none is answered yet. Latencies count from the due times."""
    target = CountingTarget(40)
    timed = ((request, 0.001 * i) for i, request in enumerate(_requests(40)))
    results = await open_loop(target, arrive(timed))
    assert len(results) == 40
    assert target.most == 40
    gaps = [later - earlier for earlier, later in pairwise(target.intended_at_s)]
    assert gaps == pytest.approx([0.001] * 39)


def _report(tokens: int, wall_s: float) -> LoadReport:
    good = LoadResult(ttft_s=0.01, total_s=0.1, output_tokens=tokens, chunks=tokens)
    return LoadReport(
        results=[good, LoadResult(error="refused")],
        wall_s=wall_s,
        client_cpu_s=0.5,
        cpu_s={"frontend": 1.0, "decode": 3.0},
        rss_mib={"frontend": 70.0, "decode": 300.0},
        noise=Noise(calibration_ms=8.0, others_cores=0.1),
    )


def test_a_summary_counts_only_successful_requests() -> None:
    """The summary has the errors separately from the rates. CPU time is per 1 000 output tokens."""
    summary = _report(2000, 4.0).summary()
    assert (summary["requests"], summary["errors"], summary["error_sample"]) == (1, 1, "refused")
    assert summary["tokens_per_s"] == 500.0
    assert summary["cpu_s_per_1k_tokens"] == {"frontend": 0.5, "decode": 1.5}
    assert summary["server_cpu_s_per_1k_tokens"] == 2.0


def test_a_comparison_shows_the_medians_of_each_system() -> None:
    """The figure of kvmesh comes first. The table omits points that only one system has."""
    scenario = Scenario(protocol="http", prompt_tokens=128, output_tokens=128, concurrency=8)
    alone = Scenario(protocol="grpc", prompt_tokens=128, output_tokens=128, concurrency=8)
    points = [
        *(Point(system="kvmesh", kind="flat", scenario=scenario, summary=_report(n, 1.0).summary()) for n in (1, 6, 9)),
        Point(system="dynamo", kind="flat", scenario=scenario, summary=_report(3, 1.0).summary()),
        Point(system="kvmesh", kind="flat", scenario=alone, summary=_report(3, 1.0).summary()),
    ]
    (line,) = compare([point.as_json() for point in points])
    assert line[:3] == ["flat", "http 128+128 x8", "6 / 3 = 2.00"]
    assert line[-1] == "3 / 1"


def test_every_part_is_measured_on_both_shapes_of_both_systems(tmp_path: Path) -> None:
    """Both systems serve the same model, which has room for the longest prompt, with or without a separate prefill worker."""
    model = roomy_model(DEMO_MODEL, tmp_path)
    found = list(setups(PARTS, SHAPES, model, tokenizer="fastokens"))
    assert [each.name for each in found] == [
        "factor 0, split", "paced 6 ms, split", "factor 0, single", "paced 6 ms, single",
    ]  # fmt: skip
    for each in found:
        assert each.mesh.prefills == each.dynamo.is_split == ("split" in each.name)
        assert each.mesh.model_dir == each.dynamo.model_dir == model
        longest = max(scenario.prompt_tokens + scenario.output_tokens for _, scenario in each.scenarios)
        assert longest < json.loads((model / "config.json").read_text())["max_position_embeddings"]
    shapes = {(part, scenario.name.partition(") ")[2]) for each in found for part, scenario in each.scenarios}
    assert {("stream", "128+128 x32"), ("stream", "128+128 x128"), ("prompt", "2000+16 x32")} <= shapes
    assert {("prompt", "8000+1 x32"), ("first", "512+64 x1")} <= shapes
    assert [each.name for each in setups(["first"], ["single"], model, tokenizer="default")] == ["factor 0, single"]


def test_the_tables_compare_results_with_their_targets() -> None:
    """The same ratio of tokens per CPU-second meets the target at full speed and misses the higher target of paced runs."""
    scenario = Scenario(protocol="http", prompt_tokens=128, output_tokens=128, concurrency=8)
    points = [
        {"part": "stream", **Point(system=system, kind=kind, scenario=scenario, summary=_report(3, 1.0).summary()).as_json()}
        for kind in ("factor 0, split", "paced 6 ms, split")
        for system in ("kvmesh", "dynamo")
    ]  # fmt: skip
    for point in points:
        point["server_cpu_s_per_1k_tokens"] = 0.1 if point["system"] == "kvmesh" else 0.19
    memory = MemoryResult(
        system="kvmesh",
        kind="factor 0, split",
        requests=10,
        errors=0,
        pss_mib={"router": [60, 61, 66], "decode": [20, 20, 21], "planner": [30, 30, 30], "up": [10, 10, 11]},
    )
    theirs = replace(memory, system="dynamo", pss_mib={"frontend": [90, 95, 99], "decode": [50, 50, 50]})
    text = "\n".join(tables(points, [memory, theirs]))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert ["tokens per CPU-s", "factor 0, split", "http 128+128 x8", "at least 1.5", "1.90", "met"] in lines
    assert ["tokens per CPU-s", "paced 6 ms, split", "http 128+128 x8", "at least 2", "1.90", "missed"] in lines
    assert ["kvmesh", "factor 0, split", "router", "10", "60", "61", "66", "+6", "0"] in lines
    assert ["kvmesh", "factor 0, split", "serving", "10", "80", "81", "87", "+7", "0"] in lines
    assert ["kvmesh", "factor 0, split", "planner + up", "10", "40", "40", "41", "+1", "0"] in lines
    assert ["kvmesh", "factor 0, split", "all", "10", "120", "121", "128", "+8", "0"] in lines
    for name in ("serving", "all"):
        assert ["dynamo", "factor 0, split", name, "10", "140", "145", "149", "+9", "0"] in lines
    assert "quietest" not in text


def test_a_comparison_has_the_requested_columns() -> None:
    """Requests per CPU-second count the CPU time of all server processes."""
    scenario = Scenario(protocol="http", prompt_tokens=8000, output_tokens=1, concurrency=32)
    points = [
        Point(system=system, kind="flat", scenario=scenario, summary=_report(3, 1.0).summary()).as_json()
        for system in ("kvmesh", "dynamo")
    ]
    for point in points:
        point["cpu_ms_per_request"] = {"frontend": 3.0, "router": 1.0} if point["system"] == "kvmesh" else {"all": 2.0}
    (line,) = compare(points, ["requests per CPU-s"])
    assert line[:3] == ["flat", "http 8000+1 x32", "250 / 500 = 0.50"]
    assert columns(["requests per CPU-s"]) == ("engines", "load", "requests per CPU-s", "errors")


def test_the_quietest_round_is_one_in_which_both_systems_were_undisturbed() -> None:
    """A round in which other processes disturbed either system is skipped. Rounds are numbered per system in the order of measurement."""
    record = {"kind": "flat", "scenario": "x8", **_report(1, 1.0).summary()}
    found = [
        {**record, "system": "kvmesh", "tokens_per_s": 10.0, "others_cores": 0.0},
        {**record, "system": "dynamo", "tokens_per_s": 2.0, "others_cores": 1.0},
        {**record, "system": "kvmesh", "tokens_per_s": 5.0, "others_cores": 0.2},
        {**record, "system": "dynamo", "tokens_per_s": 4.0, "others_cores": 0.1},
    ]
    (line,) = compare_quietest(found)
    assert line[2] == "5 / 4 = 1.25"


def test_tables_are_markdown_with_equal_columns() -> None:
    """All lines of a table have the same length."""
    lines = render(("a", "long name"), [["1", "2"], ["three", "4"]]).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


async def test_waiting_for_a_load_fails_when_the_load_watch_ends() -> None:
    """The last load of a stopped worker never changes, so without the error a trial would wait until its timeout."""
    async with running_worker("memory") as rig:
        side = Side(rig.ref, rig.channels)
        watching = asyncio.create_task(side.watch())
        await side.until(lambda load: load.kv_blocks_total > 0)
        rig.worker.stop_nowait()
        with pytest.raises(MeshError):
            await side.until(lambda load: False)
        await watching


def test_a_comparison_with_an_engines_own_server() -> None:
    """A run of one system shows only its figures. A run of both shows the median of the rounds' ratios."""
    point = {
        "system": "kvmesh",
        "streams": 8,
        "round": 0,
        "tokens_per_s": 30.0,
        "ttft_ms": {"p50": 2.0},
        "gap_ms": {"p50": 1.0},
        "server_cpu_s_per_1k_tokens": 1.0,
        "rss_mib": {"a": 1.0, "b": 2.0},
        "errors": 0,
        "others_cores": 0.5,
    }
    assert "30 / - " in beside_engine.table([point])
    rounds = [(30.0, 20.0), (60.0, 30.0), (10.0, 40.0)]
    both = [
        {**point, "round": number, "system": system, "tokens_per_s": rate}
        for number, rates in enumerate(rounds)
        for system, rate in zip(("kvmesh", "own server"), rates, strict=True)
    ]
    assert "30 / 30 = 1.50" in beside_engine.table(both)


def test_a_comparison_with_another_commit() -> None:
    """A round counts for the ratio only if the machine was quiet during both of its measurements."""
    point = {"kind": "split", "scenario": "x32", "tokens_per_s": 1.0, "ttft_ms": {"p50": 2.0}, "errors": 0}
    rounds = [(1.1, 1.0, 0.1), (3.0, 2.0, 0.1), (9.0, 1.0, 0.5), (1.0, 1.0, 0.0)]
    points = [
        {**point, "round": number, "system": system, "server_cpu_s_per_1k_tokens": cpu_s, "others_cores": others}
        for number, (now, before, others) in enumerate(rounds)
        for system, cpu_s in (("now", now), ("before", before))
    ]
    assert "1.1 / 1 = 1.10 [1.00 to 1.50]" in beside_commit.table(points)


SERVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[1]).touch()))
print("up", flush=True)
# In short steps, because a signal that arrives just before a sleep does not interrupt it.
while True:
    time.sleep(0.1)
"""
KILLED = """
import os, signal, subprocess, sys
from bench.bound import bound
server = subprocess.Popen(bound((sys.executable, "-c", *sys.argv[1:])), stdout=subprocess.PIPE)
server.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_killed_benchmark_ends_its_servers(tmp_path: Path) -> None:
    """If a benchmark is killed, its servers receive SIGTERM, so that they can shut down in order."""
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, SERVER, str(tmp_path / "ended"))
    assert await killed.wait() == -signal.SIGKILL
    await wait_until((tmp_path / "ended").exists, "the server ends")
