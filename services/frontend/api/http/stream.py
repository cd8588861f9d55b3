"""Writes a stream straight to its socket: one write per step, no general-purpose layer per chunk.

The head, the chunked encoding and the end are written here, because the web framework's writer costs more per chunk than
detokenising. A client that does not read makes the transport's buffer grow; above a bound tokens are merged: their text
waits here and goes out in one chunk once the buffer has shrunk. Text is bounded by max_tokens, so this is bounded too.
"""

import asyncio
from collections.abc import Sequence

import orjson

from kvmesh.clock import awake_timeout
from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.http.event_pace import EventPace
from services.frontend.api.openai.bodies import error_body
from services.frontend.api.openai.chunks import DONE, Chunks, event
from services.frontend.pipeline.request import Ending

LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b": keep-alive\n\n"
_POLL_S = 0.02
_SIZES = [b"%x\r\n" % size for size in range(2048)]
"""What comes before a chunk of the chunked encoding, by its size; longer ones are formatted."""


class EventStream:
    """An outlet that is one HTTP response. Nothing is written before the first text, so that errors can be bodies.

    `tokens_max`: of each choice. `pace`: how often a choice may have an event; None as often as it has a token.

    1. Pieces of a choice are written in order; a choice's ending comes after all of its text.
    2. After `close_*` nothing is written.
    3. `_line` is None unless a text can be written between its two pieces: the only choice has begun, its chunks are plain,
       none waits, and the stream is not closed.
    """

    __slots__ = (
        "_buffer_bytes_max", "_chunks", "_has_begun", "_head", "_is_chunked", "_is_closed", "_is_open", "_is_quiet",
        "_is_scheduled", "_is_shared", "_late", "_left", "_line", "_next_s", "_pace", "_pending", "_plain", "_timer",
        "_tokens_max", "_transport",
    )  # fmt: skip

    is_whole = False
    done = DONE
    """What ends a stream that ended well."""
    beat = KEEP_ALIVE
    """What is written when nothing else is."""

    def __init__(
        self,
        transport: asyncio.Transport,
        head: bytes,
        chunks: Chunks,
        *,
        choices: int,
        is_chunked: bool,
        buffer_bytes_max: int,
        tokens_max: int | None = None,
        pace: EventPace | None = None,
    ) -> None:
        self._pace = pace
        self._next_s = [0.0] * choices
        self._timer: asyncio.TimerHandle | None = None
        self._tokens_max = tokens_max
        self._transport = transport
        self._head = head
        self._chunks = chunks
        self._plain = chunks.plain
        self._is_chunked = is_chunked
        self._buffer_bytes_max = buffer_bytes_max
        # Several choices share a socket: their chunks of one step are collected and written together.
        self._is_shared = choices > 1
        self._is_open = [False] * choices
        self._late: list[_Late | None] = [None] * choices
        self._pending: list[bytes] = []
        self._left = choices
        self._has_begun = False
        self._is_scheduled = False
        self._is_closed = False
        self._is_quiet = True
        self._line: tuple[bytes, bytes, int] | None = None

    @property
    def has_begun(self) -> bool:
        """True once the head is on its way: a failure can only be an event now."""
        return self._has_begun

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink. The hot path is a plain chunk on a socket that keeps up."""
        line, transport = self._line, self._transport
        if (
            line is None
            or not text
            or transport.get_write_buffer_size() > self._buffer_bytes_max
            or transport.is_closing()
        ):
            self._on_text(choice, text, token_ids, logprobs)
            return
        self._is_quiet = False
        before, after, around = line
        body = orjson.dumps(text)
        size = around + len(body)
        transport.write((_SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size) + before + body + after)

    def _on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        if self._is_closed or self._transport.is_closing():
            # Some loops raise when a closed transport is written to; the handler's cancellation is on its way.
            return
        if not text and self._plain is not None:
            return
        late = self._late[choice]
        if self._transport.get_write_buffer_size() > self._buffer_bytes_max:
            self._late[choice] = late = late or _Late()
            late.add(text, token_ids, logprobs)
            self._line = None
            return
        if self._pace is not None and self._waits(choice, self._pace):
            self._late[choice] = late = late or _Late()
            late.add(text, token_ids, logprobs)
            return
        if late is not None:
            late.add(text, token_ids, logprobs)
            text, token_ids, logprobs = late.take()
            self._late[choice] = None
        data = self._open(choice) + self._chunk(choice, text, token_ids, logprobs)
        if len(token_ids) == self._tokens_max and not self._is_shared:
            # All of the answer at once: its end comes with it, and one write is half of what two cost.
            self._pending.append(data)
            return
        self._put(data)
        if self._plain is not None and self._is_chunked and not self._is_shared:
            before, after = self._plain[choice]
            self._line = (before, after + b"\r\n", len(before) + len(after))

    def _waits(self, choice: int, pace: EventPace) -> bool:
        """Whether the choice's next event is not due yet; then it is written when it is."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._next_s[choice]:
            if self._timer is None:
                self._timer = loop.call_at(self._next_s[choice], self._on_due)
            return True
        self._next_s[choice] = now_s + pace.gap_s
        return False

    def _on_due(self) -> None:
        """Writes what the choices have collected. A client that does not keep up goes on collecting."""
        self._timer = None
        if self._is_closed or self._transport.get_write_buffer_size() > self._buffer_bytes_max:
            return
        assert self._pace is not None, "the timer is the pace's"
        next_s = asyncio.get_running_loop().time() + self._pace.gap_s
        self._next_s = [next_s] * len(self._next_s)
        self._put(self._take_late())

    def _take_late(self) -> bytes:
        """The events of all texts that wait."""
        data = b""
        for choice, late in enumerate(self._late):
            if late is not None:
                self._late[choice] = None
                data += self._open(choice) + self._chunk(choice, *late.take())
        return data

    def _chunk(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        if self._plain is None:
            return self._chunks.text(choice, text, token_ids, logprobs)
        before, after = self._plain[choice]
        return b"%b%b%b" % (before, orjson.dumps(text), after)

    def _open(self, choice: int) -> bytes:
        if self._is_open[choice]:
            return b""
        self._is_open[choice] = True
        return self._chunks.opening(choice)

    def on_restart(self, choice: int) -> None:
        """See AnswerSink: never called, since what was written cannot be taken back."""
        raise AssertionError("a stream does not begin anew")

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self._chunks.prompt(choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        if self._is_closed:
            return
        data = self._open(choice)
        late, self._late[choice] = self._late[choice], None
        self._line = None
        if late is not None:
            data += self._chunk(choice, *late.take())
        self._left -= 1
        data += self._chunks.ending(choice, ending)
        if self._left:
            self._put(data)
        else:
            # The usage and the end follow in the same turn of the loop; all of it is one write.
            self._pending.append(data)

    def _put(self, data: bytes) -> None:
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
            self._transport.write(self._begin() + self._frame(data))

    def keep_alive(self) -> None:
        """To be called now and then: a comment, if nothing was written since the last time. A first one begins the stream."""
        if self._is_quiet and not self._is_closed and not self._transport.is_closing():
            self._transport.write(self._begin() + self._frame(self.beat))
        self._is_quiet = True

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._head

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def close_well(self, usage: Usage) -> None:
        """The end of a request that ended well."""
        self._close(self._chunks.usage(usage) + self.done)

    def close_failed(self, error: MeshError) -> None:
        """The end of a request that failed after its stream began: the error is the last event."""
        self._close(self._take_late() + self.failure(error))

    def failure(self, error: MeshError) -> bytes:
        """The last event of a stream that failed."""
        return event(error_body(error))

    def _close(self, data: bytes) -> None:
        self._pending.append(data)
        data = self._begin() + self._frame(b"".join(self._pending)) + (LAST_CHUNK if self._is_chunked else b"")
        self._pending.clear()
        self._end()
        if not self._transport.is_closing():
            self._transport.write(data)

    def abandon(self) -> None:
        """The client is gone: nothing more is written."""
        self._end()
        self._pending.clear()

    def _end(self) -> None:
        self._is_closed, self._line = True, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait_sent(self, timeout_s: float) -> bool:
        """Until the client has taken all but what the kernel holds. False: it did not within the time and was cut off."""
        if not self._transport.get_write_buffer_size():
            return True
        try:
            async with awake_timeout(timeout_s):
                while self._transport.get_write_buffer_size() and not self._transport.is_closing():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)  # The transport tells its protocol, which is the framework's.
        except TimeoutError:
            self._transport.abort()
            return False
        return True


class _Late:
    """Text of one choice that waits for a slow client."""

    __slots__ = ("_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self._texts.append(text)
        self._token_ids.extend(token_ids)
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]

    def take(self) -> tuple[str, list[int], list[TokenLogprob] | None]:
        return "".join(self._texts), self._token_ids, self._logprobs
