"""One choice of a request: receives tokens from the link and passes text to the answer sink. The hot path."""

import copy
from array import array
from collections.abc import Callable, Sequence

from kvmesh.clock import Clock
from kvmesh.core import FinishReason, LegFinish, TokenLogprob
from kvmesh.errors import LostError, MeshError
from services.frontend.metrics import ModelGaps
from services.frontend.pipeline.call_end import CallEnd
from services.frontend.pipeline.request import AnswerSink, Ending
from services.frontend.text.detokenise import Detokeniser
from services.frontend.text.stops import StopFinder


class ChoiceSink:
    """LegSink of one decode leg. Invariants:

    1. After `close` or the end the answer sink receives nothing.
    2. `on_over` is called exactly once unless `close` came first: with None after `on_end`, or with the leg's failure.
    3. While `has_shown` is false, the answer sink has received neither text nor an end of this choice, however many tokens have arrived.
    4. `_whole` is empty unless a token with an entry there can be passed on alone: the answer has begun and not ended, nothing is held
       back and there are no stop strings.
    5. `emitted_token_ids` are all tokens of the choice, from this leg and earlier legs, including those that are held back. The next leg
       continues after them.
    """

    __slots__ = (
        "_cancel", "_detokeniser", "_gap_from_s", "_gaps", "_held_ids", "_held_logprobs", "_includes_stop", "_is_over",
        "_min_tokens", "_number", "_on_first", "_on_over", "_release", "_sink", "_stop_ids", "_stops", "_whole", "emitted_token_ids",
        "finish", "has_ended", "has_leg_tokens", "has_prompt", "has_shown", "last_token_at_s",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        sink: AnswerSink,
        detokeniser: Detokeniser,
        *,
        stops: StopFinder | CallEnd | None,
        stop_ids: frozenset[int],
        min_tokens: int,
        includes_stop: bool = False,
        clock: Clock,
        gaps: ModelGaps,
        on_first: Callable[[], None],
        on_over: Callable[["ChoiceSink", MeshError | None], None],
    ) -> None:
        self._number = number
        self._sink = sink
        self._detokeniser = detokeniser
        self._stops = stops
        self._includes_stop = includes_stop
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._gaps = gaps
        self._on_first = on_first
        self._on_over = on_over
        self._cancel: Callable[[], None] | None = None
        self._release: Callable[[], None] | None = None
        self._is_over = False
        self._whole: Sequence[str | None] = ()
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprob] = []
        self.emitted_token_ids: array[int] = array("I")
        self.has_shown = self.has_ended = self.has_prompt = self.has_leg_tokens = False
        self.last_token_at_s = clock.now()
        self._gap_from_s: float | None = None
        """Arrival time of the failed leg's last token. None: there is no failed leg, or the gap is already recorded."""
        self.finish: LegFinish | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the choice, over all of its legs."""
        return len(self.emitted_token_ids)

    @property
    def is_over(self) -> bool:
        """True when the answer sink receives nothing more."""
        return self._is_over

    def successor(
        self, *, on_first: Callable[[], None], on_over: Callable[["ChoiceSink", MeshError | None], None]
    ) -> "ChoiceSink":
        """Closes this sink, whose leg failed, and returns the sink of the choice's next leg.

        It continues with the state of the detokeniser, the stop finder and the tokens that are held back. Tokens of the failed leg that
        still arrive are ignored.
        """
        # Shallow: both have the same detokeniser and lists. `close` prevents the failed leg's sink from using them.
        following = copy.copy(self)
        self.close()
        following._release = None
        following._cancel, following._on_first, following._on_over = None, on_first, on_over
        following._is_over, following._whole, following.finish = False, (), None
        if self.has_leg_tokens:
            following._gap_from_s = self.last_token_at_s
        following.has_leg_tokens = False
        return following

    def completes(self, *, max_tokens: int | None) -> LegFinish | None:
        """Returns how the answer ended if its last token has arrived and only the end itself was lost; None if the answer continues."""
        tokens = self.emitted_token_ids
        if tokens and tokens[-1] in self._stop_ids and len(tokens) > self._min_tokens:
            return LegFinish(reason=FinishReason.STOP, stop_token_id=tokens[-1])
        if max_tokens is not None and len(tokens) >= max_tokens:
            return LegFinish(reason=FinishReason.LENGTH)
        return None

    def begin(self, cancel: Callable[[], None], *, release: Callable[[], None] | None = None) -> None:
        """The leg was submitted; `cancel` stops it on its worker.

        `release` releases the handle that the leg brought. If the worker rejects the leg, it does not use the handle, which would then
        stay until its lease ends.
        """
        self._cancel, self._release = cancel, release

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        """See LegSink. The fast path is one token that decodes to whole characters."""
        if len(token_ids) == 1:
            whole, token_id = self._whole, token_ids[0]
            # Not the first token of the leg: `_whole` is empty until `_on_tokens` has received that one.
            if token_id < len(whole) and (text := whole[token_id]) and token_id not in self._stop_ids:
                gaps, gap_s = self._gaps, came_s - self.last_token_at_s
                # Most tokens of a frame: see ModelGaps.
                if gap_s == gaps.last_s:
                    gaps.repeats += 1
                else:
                    gaps.observe(gap_s, 1)
                self.last_token_at_s = came_s
                self.emitted_token_ids.append(token_id)
                self._sink.on_text(self._number, text, token_ids, logprobs=logprobs)
                return
        self._on_tokens(token_ids, logprobs, came_s)

    def _on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        if self._is_over:
            return
        count = len(token_ids)
        is_first = not self.has_leg_tokens
        if not is_first:
            self._gaps.observe(came_s - self.last_token_at_s, count)
        elif self._gap_from_s is not None:
            # The client waited from the last token of the failed leg on.
            self._gaps.observe(came_s - self._gap_from_s, count)
            self._gap_from_s = None
        self.has_leg_tokens = True
        self.last_token_at_s = came_s
        self.emitted_token_ids.extend(token_ids)
        # A leg ends at its first stop token, so only the last token can be one.
        if token_ids[-1] in self._stop_ids and not self._includes_stop:
            # The token that ends the answer has no text, but belongs to its token ids and log-probabilities.
            self._show(token_ids[:-1], logprobs[:-1] if logprobs is not None else None, self.tokens - count)
            if not self._is_over:
                self._hold(token_ids[-1:], logprobs[-1:] if logprobs is not None else None)
        elif self._stops is not None:
            self._show(token_ids, logprobs, self.tokens - count)
        elif text := self._detokeniser.push(token_ids):
            if self._held_ids:
                self._emit(text, token_ids, logprobs)
            else:
                self.has_shown = True
                self._sink.on_text(self._number, text, token_ids, logprobs=logprobs)
        else:
            self._hold(token_ids, logprobs)
        is_clear = self._stops is None and not self._held_ids and not self._is_over
        self._whole = self._detokeniser.whole() if is_clear else ()
        if is_first:
            # After the text was passed on, since the listener reports to the router, which is less urgent.
            self._on_first()

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """See LegSink."""
        if not self._is_over and not self.has_prompt:
            self.has_prompt = True
            self._sink.on_prompt(self._number, logprobs)

    def _show(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, first: int) -> None:
        """Passes tokens on one at a time, so that none after a stop string is reported. `first`: number of tokens before these."""
        stops = self._stops
        for i, token_id in enumerate(token_ids):
            text = self._detokeniser.push((token_id,))
            if stops is not None and first + i >= self._min_tokens:
                text = stops.push(text)
            entry = logprobs[i : i + 1] if logprobs is not None else None
            if text:
                self._emit(text, (token_id,), entry)
            else:
                self._hold((token_id,), entry)
            if stops is not None and stops.matched is not None:
                self._stop(stops.matched, first + i + 1)
                return

    def _hold(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self._held_ids.extend(token_ids)
        if logprobs is not None:
            self._held_logprobs.extend(logprobs)

    def _emit(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Passes text on, with the tokens that were held back because they had no text."""
        self._hold(token_ids, logprobs)
        entries = self._held_logprobs if logprobs is not None or self._held_logprobs else None
        self.has_shown = True
        self._sink.on_text(self._number, text, self._held_ids, logprobs=entries)
        self._held_ids, self._held_logprobs = [], []

    def _stop(self, stop: str, tokens: int) -> None:
        """Ends the choice at a stop string or at the end of a forced call, and cancels the leg.

        Tokens of the stop string are passed on without text.
        """
        # The frame may have tokens after the match.
        del self.emitted_token_ids[tokens:]
        if self._held_ids:
            self._emit("", (), None)
        self._end(Ending(reason=FinishReason.STOP, stop=stop or None, output_tokens=tokens))
        self._call_cancel()

    def on_finish(self, finish: LegFinish) -> None:
        """See LegSink."""
        self._cancel = None
        release, self._release = self._release, None
        # A worker that was lost may still read the KV.
        if release is not None and finish.error is not None and not isinstance(finish.error, LostError):
            release()
        if self._is_over:
            return
        self.finish = finish
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS):
            self._flush()
            # `_flush` ends the choice itself if it completes a stop string.
            if not self._is_over:
                self._end(Ending(reason=finish.reason, stop=finish.stop_token_id, output_tokens=self.tokens))
            return
        self._is_over, self._whole = True, ()
        self._on_over(self, finish.error or LostError(f"the worker ended the answer: {finish.reason.value}"))

    def _flush(self) -> None:
        """Passes on the rest of the text. The detokeniser's rest can still complete a stop string."""
        text = self._detokeniser.flush()
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.matched is None:
                text += self._stops.flush()
        if text or self._held_ids:
            self._emit(text, (), None)
        if self._stops is not None and self._stops.matched is not None:
            self._end(Ending(reason=FinishReason.STOP, stop=self._stops.matched or None, output_tokens=self.tokens))

    def _end(self, ending: Ending) -> None:
        self._is_over = self.has_shown = self.has_ended = True
        self._whole = ()
        self._sink.on_end(self._number, ending)
        self._on_over(self, None)

    def close(self) -> None:
        """Cancels the leg and stops all callbacks. Idempotent."""
        self._is_over, self._whole = True, ()
        self._call_cancel()
        # The attempt refers to its choices and they to its methods; breaking the cycle saves a garbage collection.
        self._on_first, self._on_over = _ignore, _ignore

    def _call_cancel(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()


def _ignore(*_: object) -> None:
    pass
