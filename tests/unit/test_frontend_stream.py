"""The events that a stream writes to its socket, and the number of writes."""

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import pytest

from kvmesh.core import FinishReason, TokenLogprob, Usage
from kvmesh.errors import InternalError, LostError
from services.frontend.api.answer_reader import make_reader
from services.frontend.api.http import stream as streams
from services.frontend.api.http.stream import BUFFER_BYTES_MAX, EventPace, EventStream
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.chunks import ChatChunks
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import Ending
from tests.frontend_mesh import prepared_of, served_model, write_model
from tests.keeping_socket import RecordingSocket
from tests.virtual_loop import run_virtual

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


def stream_of(
    model: ServedModel, choices: int, *, tokens_max: int | None = None, pace: EventPace | None = None, **asks: Any
) -> tuple[EventStream, RecordingSocket]:
    socket = RecordingSocket()
    messages = [{"role": "user", "content": "x"}]
    request = read_chat({"model": "tiny", "messages": messages, "n": choices, "stream": True, **asks}, "r")
    prepared = prepared_of(request, model)
    chunks = ChatChunks(request, prepared, make_reader(prepared, choices=choices), created_s=1)
    stream = EventStream(
        socket,
        HEAD,
        chunks,
        choices=choices,
        is_chunked=False,
        tokens_max=tokens_max,
        pace=pace,
    )
    return stream, socket


def deltas(data: bytes) -> list[tuple[int, str]]:
    """Returns choice and text of each event that has text."""
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    found = [(each["index"], each["delta"].get("content")) for event in events for each in event["choices"]]
    return [(choice, text) for choice, text in found if text]


async def test_choices_share_a_write(model: ServedModel) -> None:
    """All chunks of one engine step are written together, in their order."""
    stream, socket = stream_of(model, 3)
    for step in range(4):
        for choice in range(3):
            stream.on_text(choice, f"t{step}", [7], logprobs=None)
        await asyncio.sleep(0)
    assert len(socket.writes) == 4
    assert socket.writes[0].startswith(HEAD)
    for step, data in enumerate(socket.writes):
        assert deltas(data) == [(choice, f"t{step}") for choice in range(3)]


async def test_a_single_choice_is_written_immediately(model: ServedModel) -> None:
    """A chunk of a single choice does not wait for the next iteration of the event loop. Only the text differs between chunks."""
    stream, socket = stream_of(model, 1)
    stream.on_text(0, "a", [7], logprobs=None)
    stream.on_text(0, 'b"\n\u00e9', [8], logprobs=None)
    stream.on_text(0, "c", [9], logprobs=None)
    assert len(socket.writes) == 3
    assert deltas(b"".join(socket.writes)) == [(0, "a"), (0, 'b"\n\u00e9'), (0, "c")]
    assert socket.writes[2] == socket.writes[1].replace(json.dumps('b"\n\u00e9', ensure_ascii=False).encode(), b'"c"')


async def test_an_answer_that_arrives_complete_is_one_write(model: ServedModel) -> None:
    """If all tokens arrive at once, the text waits for the end and is written with it. An answer with fewer tokens does not wait."""
    ending = Ending(reason=FinishReason.LENGTH, output_tokens=2)
    whole, socket = stream_of(model, 1, tokens_max=2)
    whole.on_text(0, "ab", [7, 8], logprobs=None)
    assert not socket.writes and not whole.has_begun
    whole.on_end(0, ending)
    whole.finish(Usage())
    apart, other = stream_of(model, 1, tokens_max=3)
    apart.on_text(0, "ab", [7, 8], logprobs=None)
    assert len(other.writes) == 1
    apart.on_end(0, ending)
    apart.finish(Usage())
    assert len(socket.writes) == 1 and socket.writes == [b"".join(other.writes)]


async def test_a_stream_that_lags_gets_merged_chunks(model: ServedModel) -> None:
    """Nothing is written while too many bytes are unsent. Then all held text is one chunk, and none of it is lost."""
    stream, socket = stream_of(model, 1)
    stream.on_text(0, "a", [7], logprobs=None)
    socket.unsent = BUFFER_BYTES_MAX + 1
    for _ in range(50):
        stream.on_text(0, "x", [8], logprobs=None)
    assert len(socket.writes) == 1
    socket.unsent = 0
    stream.on_text(0, "b", [9], logprobs=None)
    assert len(socket.writes) == 2
    assert deltas(socket.writes[1]) == [(0, "x" * 50 + "b")]


@pytest.mark.parametrize(("closes", "is_sent"), [(False, True), (True, False)])
async def test_an_answer_is_sent_unless_the_connection_is_closed_first(
    model: ServedModel, closes: bool, is_sent: bool
) -> None:
    """Closing the connection, which also limits clients that do not read, empties its buffer without sending."""
    stream, socket = stream_of(model, 1)
    stream.on_text(0, "a", [7], logprobs=None)
    stream.finish(Usage())
    socket.unsent = 1
    waiting = asyncio.create_task(stream.wait_sent(60.0))
    await asyncio.sleep(0)
    if closes:
        socket.close()
    socket.unsent = 0
    assert await waiting is is_sent


@pytest.mark.parametrize("end", ["well", "failed", "abandoned"])
async def test_a_finished_stream_sends_no_keepalives(model: ServedModel, end: str) -> None:
    """A finished stream writes nothing, because clients would parse it as the beginning of the next response on the connection."""
    stream, socket = stream_of(model, 1)
    stream.on_text(0, "Hello", [7], logprobs=None)
    if end == "well":
        stream.on_end(0, Ending(reason=FinishReason.STOP))
        stream.finish(Usage())
    elif end == "failed":
        stream.fail(LostError("killed"))
    else:
        stream.close()
    written = len(socket.writes)
    for _ in range(3):
        stream.keep_alive()
    assert len(socket.writes) == written


def test_open_streams_share_the_pace() -> None:
    """A few streams have no gap between their events. The gap grows with the number of streams."""
    pace = EventPace()
    with ExitStack() as streams:
        gaps = []
        for _ in range(200):
            streams.enter_context(pace.opened())
            gaps.append(pace.gap_s)
        assert gaps[:4] == [0.0] * 4 and gaps[4] == pytest.approx(0.001) and gaps[-1] == pytest.approx(0.04)
    assert pace.gap_s == 0.0


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("is_failed", [False, True])
def test_events_keep_their_pace_and_lose_nothing(
    model: ServedModel, choices: int, is_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is written immediately. Later tokens within a gap share an event, which is written at its time or with the end."""
    monkeypatch.setattr(streams, "DETAILED_EVENTS_PER_S_MAX", 100)

    async def stream_it() -> tuple[list[tuple[float, bytes]], int]:
        loop, pace, writes = asyncio.get_running_loop(), EventPace(), []
        with pace.opened():  # 10 ms between events
            stream, socket = stream_of(model, choices, pace=pace, logprobs=True, top_logprobs=1)
            for step in range(25):  # 4 ms between steps
                for choice in range(choices):
                    entry = TokenLogprob(logprob=-float(step), alternatives=((7, -0.5),))
                    stream.on_text(choice, f"{step},", [300], logprobs=[entry])
                if step < 23:  # The last steps arrive while an event waits.
                    await asyncio.sleep(0.004)
                writes += [(loop.time(), data) for data in socket.writes]
                socket.writes.clear()
            if is_failed:
                stream.fail(InternalError("lost"))
            else:
                for choice in range(choices):
                    stream.on_end(choice, Ending(reason=FinishReason.STOP))
                stream.finish(Usage())
            count = len(socket.writes)
            writes += [(loop.time(), data) for data in socket.writes]
            stream.close()
            await asyncio.sleep(1)
            assert len(socket.writes) == count, "nothing is written after the end"
        return writes, count

    writes, _ = run_virtual(stream_it())
    data = b"".join(each for _, each in writes)
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    events_choices = [each for event in events for each in event.get("choices", [])]
    for choice in range(choices):
        own = [each for each in events_choices if each["index"] == choice]
        assert "".join(each["delta"].get("content", "") for each in own) == "".join(f"{i}," for i in range(25))
        listed = [entry["logprob"] for each in own for entry in (each["logprobs"] or {"content": []})["content"]]
        assert listed == [-float(i) for i in range(25)]
        assert sum("," in each["delta"].get("content", "") for each in own) <= 12
    assert b'"0,"' in writes[0][1]
