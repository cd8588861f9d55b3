"""Writes an event stream straight to its socket: one write per engine step, without the web framework's writer.

That writer costs more per chunk than detokenising, so the head, the chunked encoding and the end are written here. If a client
does not read, the transport's buffer grows; above a bound, tokens are merged and go out in one chunk when the buffer has
shrunk. max_tokens bounds the text, so this is bounded too.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import orjson

from kvmesh.clock import awake_timeout
from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import AnswerUpdate
from services.frontend.pipeline.request import Ending

LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b": keep-alive\n\n"
BUFFER_BYTES_MAX = 65_536
"""Unsent bytes of one stream after which its texts are merged instead of written one by one. asyncio's own high-water mark."""
DETAILED_EVENTS_PER_S_MAX = 5_000
"""Events per second of all streams with an EventPace. Above it tokens share events: an event takes the event loop tens of microseconds."""
GAP_S_MIN = 0.001
"""Shorter gaps between events are not worth a timer."""
_POLL_S = 0.02
_SIZES = [b"%x\r\n" % size for size in range(2048)]
"""The size line of a chunk, by its size; those of longer chunks are formatted."""


class EventEncoder(Protocol):
    """Encodes the events of one stream for one API.

    `plain`: per choice the bytes before and after the JSON string of a chunk that is only text; None if no chunk is.
    `keep_alive`: what is written when nothing else is.
    """

    plain: Sequence[tuple[bytes, ...]] | None
    keep_alive: bytes

    def begin_choice(self, choice: int) -> bytes:
        """Returns what precedes the first text of a choice; may be empty."""
        ...

    def add_prompt_logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """Receives the log-probabilities of the prompt, before `begin_choice`."""
        ...

    def encode_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        """Encodes new text; empty if it must wait for more text."""
        ...

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        """Returns the last event of a choice."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Returns the last events of a request that succeeded."""
        ...

    def failure(self, error: MeshError) -> bytes:
        """Returns the last event of a request that failed after its stream began."""
        ...


class EventPace:
    """Limits the events per second of all streams with expensive events: those with log-probabilities or token ids.

    With more open streams, each stream has longer gaps, and the tokens of a gap share an event. An event with one token costs several
    times as much as one more token in an event, mostly for the socket and the surrounding JSON. Without a limit a few hundred streams
    take all of the event loop's time, and every other client waits.
    """

    def __init__(self) -> None:
        self._open = 0

    @property
    def gap_s(self) -> float:
        """The shortest time between two events of one stream."""
        gap_s = self._open / DETAILED_EVENTS_PER_S_MAX
        return gap_s if gap_s >= GAP_S_MIN else 0.0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Counts a stream while it is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class EventStream:
    """Answer sink that is one HTTP response. Nothing is written before the first text, so that failures can be bodies.

    `tokens_max`: of each choice. `pace`: limits the events of a choice; None: one per token. `keep_alive_s`: time without a
    write after which a keep-alive is written; 0: never.

    1. The pieces of a choice are written in order, its ending after all of its text.
    2. After `finish`, `fail` or `close` nothing is written.
    3. `_line` is None unless a text can be written between its two pieces: the only choice has begun, its chunks are plain,
       it has no backlog, and the stream is not closed.
    """

    __slots__ = (
        "_backlogs", "_encoder", "_has_begun", "_head", "_is_chunked", "_is_closed", "_is_open",
        "_is_quiet", "_is_scheduled", "_is_shared", "_keep_alive_s", "_keep_alive_timer", "_line", "_next_s", "_open_choices",
        "_pace", "_pace_timer", "_pending", "_plain", "_tokens_max", "_transport",
    )  # fmt: skip

    is_whole = False

    def __init__(
        self,
        transport: asyncio.Transport,
        head: bytes,
        encoder: EventEncoder,
        *,
        choices: int,
        is_chunked: bool,
        tokens_max: int | None = None,
        pace: EventPace | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        self._pace = pace
        self._next_s = [0.0] * choices
        self._pace_timer: asyncio.TimerHandle | None = None
        self._tokens_max = tokens_max
        self._transport = transport
        self._head = head
        self._encoder = encoder
        self._plain = encoder.plain
        self._is_chunked = is_chunked
        # Several choices share a socket: their chunks of one step are collected and written together.
        self._is_shared = choices > 1
        self._is_open = [False] * choices
        self._backlogs: list[AnswerUpdate | None] = [None] * choices
        self._pending: list[bytes] = []
        self._open_choices = choices
        self._has_begun = False
        self._is_scheduled = False
        self._is_closed = False
        self._is_quiet = True
        # What precedes and follows the text in a chunk, and the number of these bytes without the chunk's own line break.
        self._line: tuple[bytes, bytes, int] | None = None
        self._keep_alive_s = keep_alive_s
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        if keep_alive_s:
            self._keep_alive_timer = asyncio.get_running_loop().call_later(keep_alive_s, self.keep_alive)

    @property
    def has_begun(self) -> bool:
        """True once the head is written: from then on a failure can only be an event."""
        return self._has_begun

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        # The hot path: a plain chunk on a socket that keeps up.
        line, transport = self._line, self._transport
        if line is None or not text or transport.get_write_buffer_size() > BUFFER_BYTES_MAX or transport.is_closing():
            self._on_text(choice, text, token_ids, logprobs=logprobs)
            return
        self._is_quiet = False
        before, after, around = line
        body = orjson.dumps(text)
        size = around + len(body)
        transport.write((_SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size) + before + body + after)

    def _on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        if self._is_closed or self._transport.is_closing():
            # Some loops raise when a closed transport is written to; the cancellation of the handler follows.
            return
        # A plain chunk has no room for tokens without text.
        if not text and self._plain is not None:
            return
        is_full = self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX
        if is_full:
            self._line = None
        backlog = self._backlogs[choice]
        if is_full or (self._pace is not None and self._is_early(choice, self._pace)):
            if backlog is None:
                backlog = self._backlogs[choice] = AnswerUpdate(choice=choice)
            backlog.add(text, token_ids, logprobs)
            return
        if backlog is not None:
            backlog.add(text, token_ids, logprobs)
            text, token_ids, logprobs = backlog.text, backlog.token_ids, backlog.logprobs
            self._backlogs[choice] = None
        data = self._begin_choice(choice) + self._encode(choice, text, token_ids, logprobs=logprobs)
        if len(token_ids) == self._tokens_max and not self._is_shared:
            # The whole answer has arrived, so its end follows immediately; one write costs half as much as two.
            self._pending.append(data)
            return
        self._send(data)
        if self._plain is not None and self._is_chunked and not self._is_shared:
            before, after = self._plain[choice]
            self._line = (before, after + b"\r\n", len(before) + len(after))

    def _is_early(self, choice: int, pace: EventPace) -> bool:
        """Returns whether the next event of the choice is not due yet; a timer then writes it."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._next_s[choice]:
            # One timer serves all choices: it writes all backlogs.
            if self._pace_timer is None:
                self._pace_timer = loop.call_at(self._next_s[choice], self._send_due)
            return True
        self._next_s[choice] = now_s + pace.gap_s
        return False

    def _send_due(self) -> None:
        """Writes the backlogs, unless the client does not keep up."""
        self._pace_timer = None
        if self._is_closed or self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            return
        assert self._pace is not None, "only a pace sets the timer"
        next_s = asyncio.get_running_loop().time() + self._pace.gap_s
        self._next_s = [next_s] * len(self._next_s)
        self._send(self._take_backlogs())

    def _take_backlogs(self) -> bytes:
        data = b""
        for choice, backlog in enumerate(self._backlogs):
            if backlog is not None:
                self._backlogs[choice] = None
                data += self._begin_choice(choice) + self._encode(
                    choice, backlog.text, backlog.token_ids, logprobs=backlog.logprobs
                )
        return data

    def _encode(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        if self._plain is None:
            return self._encoder.encode_text(choice, text, token_ids, logprobs=logprobs)
        before, after = self._plain[choice]
        return b"%b%b%b" % (before, orjson.dumps(text), after)

    def _begin_choice(self, choice: int) -> bytes:
        if self._is_open[choice]:
            return b""
        self._is_open[choice] = True
        return self._encoder.begin_choice(choice)

    def on_restart(self, choice: int) -> None:
        raise AssertionError("what a stream has written cannot be taken back")

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        self._encoder.add_prompt_logprobs(choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        if self._is_closed:
            return
        data = self._begin_choice(choice)
        backlog, self._backlogs[choice] = self._backlogs[choice], None
        self._line = None
        if backlog is not None:
            data += self._encode(choice, backlog.text, backlog.token_ids, logprobs=backlog.logprobs)
        self._open_choices -= 1
        data += self._encoder.end_choice(choice, ending)
        if self._open_choices:
            self._send(data)
        else:
            # `finish` follows in the same iteration of the event loop and writes all of it at once.
            self._pending.append(data)

    def _send(self, data: bytes) -> None:
        if not data:
            return
        self._pending.append(data)
        if not self._is_shared:
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        if self._pending and not self._is_closed and not self._transport.is_closing():
            data = b"".join(self._pending)
            self._pending.clear()
            self._is_quiet = False
            self._transport.write(self._take_head() + self._frame(data))

    def keep_alive(self) -> None:
        """Writes a keep-alive if nothing was written since the last call. It can be the first write of a stream."""
        if self._is_closed:
            return
        if self._is_quiet and not self._transport.is_closing():
            self._transport.write(self._take_head() + self._frame(self._encoder.keep_alive))
        self._is_quiet = True
        if self._keep_alive_s:
            self._keep_alive_timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self.keep_alive)

    def _take_head(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._head

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def finish(self, usage: Usage) -> None:
        """Ends the stream of a request that succeeded."""
        self._write_end(self._encoder.end(usage))

    def fail(self, error: MeshError) -> None:
        """Ends the stream of a request that failed: the error is the last event."""
        self._write_end(self._take_backlogs() + self._encoder.failure(error))

    def _write_end(self, data: bytes) -> None:
        self._pending.append(data)
        # Joined before `close`, which clears the list.
        end = self._frame(b"".join(self._pending)) + (LAST_CHUNK if self._is_chunked else b"")
        head = self._take_head()
        self.close()
        if not self._transport.is_closing():
            self._transport.write(head + end)

    def close(self) -> None:
        """Ends all writing. Idempotent."""
        self._is_closed, self._line = True, None
        self._pending.clear()
        for timer in (self._pace_timer, self._keep_alive_timer):
            if timer is not None:
                timer.cancel()

    async def wait_sent(self, timeout_s: float) -> bool:
        """Waits until only the kernel still has unsent data. Closes the connection and returns False if that takes too long.

        Also returns False if the connection was closed during the wait, for example by its limit for clients that read nothing: the rest
        was not sent.
        """
        if not self._transport.get_write_buffer_size():
            return True
        try:
            async with awake_timeout(timeout_s):
                while self._transport.get_write_buffer_size() and not self._transport.is_closing():  # noqa: ASYNC110
                    await asyncio.sleep(
                        _POLL_S
                    )  # Only the protocol, which is the framework's, gets the transport's events.
        except TimeoutError:
            self._transport.abort()
            return False
        return not self._transport.is_closing()
