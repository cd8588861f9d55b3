"""An outlet for a consumer that takes messages at its own pace: what it has not taken yet is merged, not queued."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core import TokenLogprob
from services.frontend.pipeline.request import Ending


@dataclass(slots=True, kw_only=True)
class News:
    """What is new of one choice."""

    choice: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    ending: Ending | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self.texts)


class PulledOutlet:
    """At most one News per choice is held; text is bounded by max_tokens.

    With `is_whole` nothing may be taken before the request has ended well: an answer that was taken cannot begin anew.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._news: dict[int, News] = {}
        self._wakeup = asyncio.Event()

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        news = self._of(choice)
        news.texts.append(text)
        news.token_ids.extend(token_ids)
        if logprobs is not None:
            news.logprobs = [*(news.logprobs or ()), *logprobs]
        if not self.is_whole:
            self._wakeup.set()

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        self._news.pop(choice, None)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self._of(choice).prompt_logprobs = entries

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._of(choice).ending = ending
        self._wakeup.set()

    def _of(self, choice: int) -> News:
        news = self._news.get(choice)
        if news is None:
            news = self._news[choice] = News(choice=choice)
        return news

    def take(self) -> list[News]:
        """All that can be handed out now."""
        self._wakeup.clear()
        ready, self._news = list(self._news.values()), {}
        return ready

    async def wait(self, running: "asyncio.Task[object]") -> None:
        """Until there may be something to take, or `running` has ended."""
        waiting = asyncio.ensure_future(self._wakeup.wait())
        try:
            await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
