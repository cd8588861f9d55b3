"""Holds back a decode leg's tokens until the prompt's log-probabilities have come from the prefill leg (rendezvous handoff)."""

from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.core import FinishReason, LegFinish, TokenLogprob
from kvmesh.rpc.clients import LegSink


class HeldSink:
    """A LegSink in front of another one.

    It holds tokens until the prompt's log-probabilities have arrived, because both legs run at the same time. The prefill leg ends as
    soon as the KV is sent, so few tokens are held. A failure passes immediately.
    """

    def __init__(self, sink: LegSink) -> None:
        self._sink = sink
        self._calls: list[Callable[[], None]] | None = []

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self._pass(partial(self._sink.on_tokens, token_ids, logprobs, came_s))

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Ignored: the prefill leg gives them."""

    def on_finish(self, finish: LegFinish) -> None:
        if finish.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._calls = None
        self._pass(partial(self._sink.on_finish, finish))

    def _pass(self, call: Callable[[], None]) -> None:
        if self._calls is None:
            call()
        else:
            self._calls.append(call)

    def release(self, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Passes the prompt's log-probabilities, then everything that was held."""
        if logprobs is not None:
            self._sink.on_prompt(logprobs)
        calls, self._calls = self._calls, None
        for call in calls or ():
            call()
