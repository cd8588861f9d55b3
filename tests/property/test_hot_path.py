"""The fast path of a streamed token, compared with the general one: same bytes, text and counts."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, LegFinish, TokenLogprob, Usage
from kvmesh.telemetry.metrics import DURATION_BUCKETS_S
from services.frontend.api.answer_reader import make_reader
from services.frontend.api.http.stream import BUFFER_BYTES_MAX, EventEncoder, EventStream
from services.frontend.api.openai.bodies import CHAT_CHUNK_OBJECT, COMPLETION_OBJECT
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.chunks import ChatChunks, CompletionChunks
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.run import ApiRequest
from services.frontend.metrics import ModelGaps
from services.frontend.models import ServedModel
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.request import Ending
from services.frontend.settings import PipelineSettings
from services.frontend.text.detokenise import Detokenisers
from services.frontend.text.stops import StopFinder
from tests.frontend_mesh import prepared_of, served_model, write_model
from tests.keeping_socket import RecordingSocket
from tests.property.test_detokenise import byte_fallback, byte_level

TEXTS = (
    st.text(min_size=1, max_size=12)
    | st.text(min_size=1, max_size=4).map(lambda text: 600 * text)
    | st.sampled_from('"\\\n\x00')
)


@lru_cache
def model() -> ServedModel:
    with TemporaryDirectory() as folder:
        return served_model(write_model(Path(folder)))


def chat(*, includes_usage: bool) -> tuple[EventEncoder, Callable[[str], dict[str, Any]]]:
    """Returns the encoder of a chat's chunks, and a function that makes the expected event for a text."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    request = read_chat({**body, **_options(includes_usage)}, "r")

    def choice(text: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    prepared = prepared_of(request, model())
    chunks = ChatChunks(request, prepared, make_reader(prepared, choices=1), created_s=1)
    return chunks, _event(request, "chatcmpl-r", CHAT_CHUNK_OBJECT, choice)


def completion(*, includes_usage: bool) -> tuple[EventEncoder, Callable[[str], dict[str, Any]]]:
    """Returns the same for a completion."""
    body = {"model": "tiny", "prompt": "x", "stream": True}
    request = read_completion({**body, **_options(includes_usage)}, "r", PipelineSettings())

    def choice(text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    return CompletionChunks(request, [prepared_of(request, model())], created_s=1), _event(
        request, "cmpl-r", COMPLETION_OBJECT, choice
    )


def _options(includes_usage: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if includes_usage else {}


def _event(
    request: ApiRequest, chunk_id: str, kind: str, choice: Callable[[str], dict[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    tail = {"usage": None} if request.includes_usage else {}
    return lambda text: {
        "id": chunk_id,
        "object": kind,
        "created": 1,
        "model": request.model,
        "choices": [choice(text)],
        **tail,
    }


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=12),
    make=st.sampled_from([chat, completion]),
    includes_usage=st.booleans(),
    is_chunked=st.booleans(),
)
def test_each_text_is_one_event_in_one_write(
    texts: list[tuple[str, bool]], make: Any, includes_usage: bool, is_chunked: bool
) -> None:
    """The bytes equal those of encoding the whole object. Texts that met a full buffer are part of the next event."""
    chunks, event = make(includes_usage=includes_usage)
    socket, expected, waiting = RecordingSocket(), [], ""
    stream = EventStream(socket, b"HEAD", chunks, choices=1, is_chunked=is_chunked)
    stream.on_text(0, "begin", (7,), logprobs=None)
    for text, is_full in texts:
        socket.unsent = BUFFER_BYTES_MAX + 1 if is_full else 0
        stream.on_text(0, text, (7,), logprobs=None)
        waiting += text
        if not is_full:
            body = b"data: " + orjson.dumps(event(waiting)) + b"\n\n"
            expected.append(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
            waiting = ""
    assert socket.writes[1:] == expected
    stream.on_end(0, Ending(reason=FinishReason.LENGTH))
    written = len(socket.writes)
    stream.finish(Usage())
    stream.on_text(0, "late", (7,), logprobs=None)
    assert len(socket.writes) == written + 1
    assert socket.writes[-1].endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if is_chunked else b""))


class RecordingOutlet:
    """Records all calls."""

    is_whole = False

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.endings: list[Ending] = []

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        assert not self.endings
        assert logprobs is None or len(logprobs) == len(token_ids)
        self.text += text
        self.token_ids += token_ids
        self.logprobs += logprobs or ()

    def on_restart(self, choice: int) -> None:
        raise AssertionError("nothing failed")

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        raise AssertionError("the request has no prompt_logprobs")

    def on_end(self, choice: int, ending: Ending) -> None:
        self.endings.append(ending)


@settings(max_examples=120, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 520), min_size=1, max_size=40),
    stop_ids=st.frozensets(st.integers(0, 520), max_size=20),
    stops=st.lists(st.text("tea ", min_size=1, max_size=3), max_size=2),
    is_byte_level=st.booleans(),
    has_logprobs=st.booleans(),
    includes_stop=st.booleans(),
    data=st.data(),
)
def test_an_answer_does_not_depend_on_the_groups_of_its_tokens(
    token_ids: list[int],
    stop_ids: frozenset[int],
    stops: list[str],
    is_byte_level: bool,
    has_logprobs: bool,
    includes_stop: bool,
    data: st.DataObject,
) -> None:
    """Single tokens and any groups of tokens give the same text, tokens and endings."""
    detokenisers = Detokenisers(byte_level() if is_byte_level else byte_fallback())
    # The worker ends an answer with its first stop token.
    ends = [i for i, token_id in enumerate(token_ids) if token_id in stop_ids]
    token_ids = token_ids[: ends[0] + 1] if ends else token_ids
    cuts = sorted(data.draw(st.sets(st.integers(1, len(token_ids)))) | {len(token_ids)})

    def outcome_of(cuts: Sequence[int]) -> tuple[Any, ...]:
        outlet, firsts, overs = RecordingOutlet(), [], []
        choice = ChoiceSink(
            0,
            outlet,
            detokenisers.detokeniser(skip_special_tokens=True),
            stops=StopFinder(stops, includes_stop=includes_stop) if stops else None,
            stop_ids=stop_ids,
            min_tokens=0,
            includes_stop=includes_stop,
            clock=SystemClock(),
            gaps=ModelGaps(),
            on_first=lambda: firsts.append(1),
            on_over=lambda _, error: overs.append(error),
        )
        entries = [TokenLogprob(logprob=-float(i)) for i in token_ids]
        start = 0
        for cut in cuts:
            choice.on_tokens(token_ids[start:cut], entries[start:cut] if has_logprobs else None, float(cut))
            start = cut
        choice.on_finish(LegFinish(reason=FinishReason.STOP, usage=Usage()))
        choice.on_tokens([100], None, 99.0)
        assert (firsts, overs, len(outlet.endings)) == ([1], [None], 1)
        return outlet.text, outlet.token_ids, outlet.logprobs, outlet.endings, choice.tokens

    assert outcome_of(range(1, len(token_ids) + 1)) == outcome_of(cuts)


@settings(max_examples=100, deadline=None)
@given(gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.006, 0.0061, 0.5, 1e9]), st.integers(1, 3)), max_size=30))
def test_repeated_gaps_are_counted_like_others(gaps: list[tuple[float, int]]) -> None:
    """Buckets and sum equal those of counting each token's gap separately."""
    counted = ModelGaps()
    for gap_s, tokens in gaps:
        if tokens == 1 and gap_s == counted.last_s:
            counted.repeats += 1
        else:
            counted.observe(gap_s, tokens)
    each = [gap_s / tokens for gap_s, tokens in gaps for _ in range(tokens)]
    bounds = (*DURATION_BUCKETS_S, float("inf"))
    assert [count for _, count in counted.cumulative()] == [sum(gap <= bound for gap in each) for bound in bounds]
    assert abs(counted.sum_s - sum(each)) <= 1e-9 * (1 + sum(each))
