"""Parses one answer: runs the readers of its families on a feed."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily
from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps
from services.frontend.parsers.marks import Marks, marks_of
from services.frontend.parsers.parts import Part, Reasoning


class AnswerParser:
    """Converts text in pieces to parts. The parts of all `push` calls and of `flush`, adjacent ones of a kind joined, do not
    depend on where the pieces end.
    """

    __slots__ = ("_feed", "_held_tokens", "_steps", "reasoning_tokens")

    def __init__(self, feed: Feed, steps: Steps) -> None:
        self._feed = feed
        self._steps = steps
        self._held_tokens = 0
        self.reasoning_tokens = 0
        """Number of tokens of reasoning."""
        # Runs to the first wait, where the steps continue when text arrives.
        next(steps, None)

    @property
    def calls(self) -> int:
        """Number of calls begun."""
        return self._feed.calls

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        """Returns the parts that are certain now. `tokens`: number of tokens of the text."""
        feed = self._feed
        if feed.plain is not None and text and not text[-1].isspace() and feed.plain.search(text) is None:
            # The fast path: nothing is held back and no mark begins in the text.
            if feed.plain_kind is Reasoning:
                self.reasoning_tokens += tokens
            return (feed.plain_kind(text),)
        was_reasoning = feed.is_reasoning
        feed.add(text)
        next(self._steps, None)
        if was_reasoning or feed.is_reasoning:
            self._count(tokens, was_reasoning=was_reasoning)
        return feed.take_parts()

    def _count(self, tokens: int, *, was_reasoning: bool) -> None:
        """Counts tokens of reasoning. Tokens of marks do not count, so tokens of a possible mark are held."""
        feed = self._feed
        if was_reasoning and feed.is_reasoning:
            self._held_tokens += tokens
            if feed.kept == len(feed.text):
                self.reasoning_tokens += self._held_tokens
                self._held_tokens = 0
        else:
            # The text contains the mark, which has at least one of the tokens.
            self.reasoning_tokens += max(0, tokens - 1)
            self._held_tokens = 0

    def flush(self) -> Sequence[Part]:
        """Returns the rest at the end of the answer. A truncated call keeps its partial arguments."""
        feed = self._feed
        feed.is_over = True
        next(self._steps, None)
        # Blanks after the last call are dropped; in an answer without calls they are content.
        if feed.blanks and not feed.calls:
            feed.parts.append(feed.blanks)
        feed.blanks = ""
        return feed.take_parts()


def _answer_steps(
    feed: Feed, tools: ToolFamily | None, reasoning: ReasoningFamily | None, *, is_inside: bool = False
) -> Steps:
    """Reads an answer: content, and at each mark the reasoning or call that it begins. `is_inside`: begins inside reasoning."""
    readers: dict[str, Reader] = {}
    if tools is not None:
        readers |= dict.fromkeys(tools.closing_marks, _skip_if_broken) | dict.fromkeys(tools.hidden_marks, _skip_mark)
        # Last: a mark that begins a call may be among the hidden ones.
        readers |= tools.readers
        feed.stops, feed.hidden = marks_of(tools.stops), marks_of(frozenset(tools.hidden_marks))
    if reasoning is not None:
        read = _reasoning_reader(reasoning, tools)
        readers |= dict.fromkeys(reasoning.hidden_marks, _skip_mark) | dict.fromkeys(reasoning.openings, read)
        if reasoning.answer_marks:
            readers |= _answer_mark_readers(*reasoning.answer_marks)
        if is_inside:
            yield from read(feed)
    marks = Marks(readers)
    while mark := (yield from feed.stream_plain(marks, str)):
        feed.at += len(mark)
        yield from _attempt(feed, readers[mark])


def _skip_mark(feed: Feed) -> Steps:
    """Drops a mark that has no meaning in its place."""
    yield from ()


def _skip_if_broken(feed: Feed) -> Steps:
    """Drops a closing mark after a malformed call. Elsewhere such a mark is text."""
    if not feed.is_broken:
        raise Malformed("")
    yield from ()


def _attempt(feed: Feed, reader: Reader) -> Steps:
    """Runs a reader. Text that it cannot read is content."""
    calls = feed.calls
    try:
        yield from reader(feed)
    except Malformed as error:
        feed.is_broken = feed.is_broken or feed.calls > calls
        feed.reject(error.reason)
    feed.settle()


def _reasoning_reader(family: ReasoningFamily, tools: ToolFamily | None) -> Reader:
    tool_marks = tools.readers if tools is not None and family.ends_at_tools else ()
    ends = Marks((*family.closings, *family.openings, *tool_marks))

    def read(feed: Feed) -> Steps:
        # Blanks around reasoning are dropped at the ends of the answer; between two texts they separate them.
        blanks, feed.blanks = feed.blanks, ""
        feed.drops_blanks = True
        yield from feed.has(family.label)
        # Models may repeat an opening mark that the prompt already contains.
        while (mark := (yield from feed.stream_plain(ends, Reasoning))) in family.openings:
            feed.at += len(mark)
            yield from feed.has(family.label)
        if mark in family.closings:
            feed.at += len(mark)
        feed.blanks = blanks if feed.has_content else ""
        feed.drops_blanks = not feed.has_content
        feed.settle()

    return read


def _answer_mark_readers(opening: str, closing: str) -> dict[str, Reader]:
    """Returns readers that drop the marks around the answer after the reasoning, as in `<think>...</think><response>...</response>`.

    Marks that do not enclose the whole answer are content.
    """
    is_open = False

    def begin(feed: Feed) -> Steps:
        nonlocal is_open
        if not feed.has_reasoning or feed.has_content or is_open:
            raise Malformed("")
        is_open = True
        feed.drop_blanks()
        feed.drops_blanks = True
        yield from ()

    def end(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        if not is_open or (yield from feed.peek()):
            raise Malformed("")
        feed.drop_blanks()

    return {opening: begin, closing: end}


def answer_parser(
    tools: ToolFamily | WholeFamily | None,
    reasoning: ReasoningFamily | WholeFamily | None,
    *,
    functions: Mapping[str, Mapping[str, Any]] | None = None,
    prompt_tail: str = "",
) -> AnswerParser:
    """Creates a parser for one answer.

    `functions`: parameter schemas of the request's tools by name. `prompt_tail`: the end of the prompt's text, which shows
    whether the answer begins inside reasoning.
    """
    feed = Feed(functions, takes_calls=tools is not None)
    for family in (reasoning, tools):
        if isinstance(family, WholeFamily):
            return AnswerParser(feed, family.reader(feed))
    assert not isinstance(tools, WholeFamily) and not isinstance(reasoning, WholeFamily)
    is_inside = reasoning is not None and reasoning.begins_inside(prompt_tail)
    return AnswerParser(feed, _answer_steps(feed, tools, reasoning, is_inside=is_inside))
