"""Recordings of traffic: they show shared prefixes but no prompts, and a slow reader cannot exhaust memory."""

import asyncio
import gzip
import json
from pathlib import Path
from random import Random

import pytest

from kvmesh.cli.record import Recording, RecordSettings, lines_of, main
from kvmesh.core import Ask, Report, ReportKind
from kvmesh.core.whatif import RecordedBatch, RecordedTraffic
from kvmesh.errors import OverloadedError
from kvmesh.kv.blocks import block_hashes
from kvmesh.rpc.codec.recording import from_recorded, to_recorded
from kvmesh.settings import load
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.explain import DecisionRecord
from services.router.serving.recorder import UNREAD_MAX, WATCHERS_MAX, RequestRecorder, salted_blocks
from services.whatif.traces import load_trace

SALT = b"s" * 32
FINISHED = Report(kind=ReportKind.FINISHED, elapsed_s=1.0, output_tokens=7)


def core_and_recorder() -> tuple[RouterCore, RequestRecorder]:
    core = RouterCore(CoreSettings(), router_id="r", generator=Random(1))
    return core, RequestRecorder(core.history)


def finish(core: RouterCore, name: str, tokens: list[int], at_s: float) -> None:
    """Adds a finished request to the history."""
    hashes = tuple(block_hashes(tokens, 16))
    ask = Ask(request_id=name, model="m", prompt_tokens=len(tokens), block_hashes=hashes, block_size_tokens=16)
    core.history.add(DecisionRecord(ask=ask, ask_id=1, policy=core.placer.policy, decided_at_s=at_s))
    core.history.add_report(name, FINISHED)


def test_shared_blocks_are_visible_and_prompts_are_not():
    """Prompts with 1024 equal tokens share two ids of 512 tokens. With another salt no id is the same, and no id is a block hash of the mesh."""
    tokens = list(range(1500))
    one, other = block_hashes(tokens, 16), block_hashes([*tokens[:1024], *range(5000, 5476)], 16)
    ids, others = salted_blocks(one, 16, SALT), salted_blocks(other, 16, SALT)
    assert len(ids) == 2
    assert ids == others
    assert not set(ids) & {*one, *(each >> 1 for each in one)}
    assert not set(ids) & set(salted_blocks(one, 16, b"t" * 32))
    assert salted_blocks(block_hashes([*range(7, 1507)], 16), 16, SALT)[0] != ids[0]
    # Block sizes that divide 512 give ids. Others give none.
    assert len(salted_blocks(block_hashes(tokens, 512), 512, SALT)) == 2
    assert salted_blocks(one, 48, SALT) == ()


async def test_finished_requests_are_sent_to_readers_only():
    """Requests are recorded only if they finish while a reader is connected."""
    core, recorder = core_and_recorder()
    finish(core, "before", [1] * 600, 5.0)
    assert core.history.on_finished is None
    batches = recorder.watch(SALT)
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    finish(core, "a", [2] * 600, 10.0)
    finish(core, "b", [2] * 1100, 12.0)
    found = (await first).requests
    if len(found) == 1:
        found += (await anext(batches)).requests
    assert [(each.arrived_at_s, each.prompt_tokens, each.output_tokens, len(each.block_ids)) for each in found] == [
        (10.0, 600, 7, 1),
        (12.0, 1100, 7, 2),
    ]
    assert found[0].block_ids[0] == found[1].block_ids[0]
    await batches.aclose()
    assert core.history.on_finished is None


async def test_a_slow_reader_loses_the_oldest_requests():
    """Lost requests are counted. The others are sent in bounded batches."""
    core, recorder = core_and_recorder()
    batches = recorder.watch(SALT)
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    for number in range(UNREAD_MAX + 10):
        finish(core, f"r{number}", [1], float(number))
    batch = await first
    assert batch.lost_requests == 10
    assert batch.requests[0].arrived_at_s == 10.0
    total = len(batch.requests)
    while total < UNREAD_MAX:
        batch = await anext(batches)
        assert len(batch.requests) <= 256
        total += len(batch.requests)
    await batches.aclose()


async def test_recordings_are_bounded_and_end_with_the_router():
    """A reader beyond the limit is refused. All recordings end when the router stops."""
    _, recorder = core_and_recorder()
    watches = [recorder.watch(SALT) for _ in range(WATCHERS_MAX)]
    reads = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await anext(recorder.watch(SALT))
    recorder.close()
    for read in reads:
        with pytest.raises(StopAsyncIteration):
            await read


def test_a_recorded_file_is_a_trace(tmp_path: Path):
    """The file, optionally compressed, is a trace of the simulator, in order of arrival and starting at 0."""
    requests = [
        RecordedTraffic(arrived_at_s=1000.5, prompt_tokens=700, output_tokens=3, block_ids=(11,)),
        RecordedTraffic(arrived_at_s=1000.0, prompt_tokens=600, output_tokens=2, block_ids=(11,)),
    ]
    assert from_recorded(to_recorded(RecordedBatch(requests=tuple(requests), lost_requests=3))).requests == tuple(
        requests
    )
    path = tmp_path / "traffic.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines_of(requests)).encode()))
    first, second = load_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.block_ids) == (0.0, 600, 2, (11,))
    assert (second.at_s, second.prompt_tokens) == (0.5, 700)
    assert set(json.loads(lines_of(requests)[0])) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_a_recording_ends_at_its_limit():
    """A recording keeps at most `requests_max` requests and counts the lost ones."""
    recording = Recording(requests_max=3)
    traffic = RecordedTraffic(arrived_at_s=0.0, prompt_tokens=1, output_tokens=1)
    recording.add([traffic] * 2, 0)
    assert not recording.is_full.is_set()
    recording.add([traffic] * 2, 5)
    assert recording.is_full.is_set()
    assert (len(recording.requests), recording.lost) == (3, 5)


def test_settings_load_and_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`kvmesh record` refuses an existing file or an unknown suffix."""
    settings = load(RecordSettings, argv=["--duration-s", "5"], environ={}, program="kvmesh record", description="")
    assert settings.duration_s == 5.0
    path = tmp_path / "traffic.jsonl"
    path.write_text("kept")
    assert main(["--out", str(path)]) == 2
    assert main(["--out", str(tmp_path / "traffic.csv")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "kept"
