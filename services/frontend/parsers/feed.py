"""The input of readers: a cursor in the text of one answer, which grows as tokens come.

The result of each primitive depends only on the text and not on where its pieces end: the primitive yields until the text
decides, or until the answer is over. Text before `kept` was delivered. If reading fails, the text from `kept` to the cursor is
content.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from services.frontend.parsers.marks import NO_MARKS, Marks
from services.frontend.parsers.parts import (
    MALFORMED,
    TRUNCATED,
    CallArguments,
    CallBegin,
    Part,
    Reasoning,
    Warned,
)

Steps = Generator[None, None, None]
TextSteps = Generator[None, None, str]
BoolSteps = Generator[None, None, bool]
Reader = Callable[["Feed"], "Steps"]
Emit = Callable[[str], None]
ToPart = Callable[[str], Part]

HELD_CHARACTERS_MAX = 65_536
"""Longest text that a reader may hold back before it decides; longer text is content."""
NAME_CHARACTERS_MAX = 256
BLANKS_MAX = 1024
_BLANKS = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not in the reader's format. An empty `reason` means that it did not begin like a call."""

    def __init__(self, reason: str = MALFORMED) -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupted(Malformed):
    """A mark of the family interrupts an incomplete value of a call. The cursor is at the mark."""


class ValueEnds:
    """The marks that end a value without quotes, and how to distinguish them from the same text inside the value.

    `closing` and `others` always end it. A `doubtful` mark is text of the value if the next mark of `deciding` and `closing` is
    `closing`; else the closing mark is missing, and the doubtful one ends the value.
    """

    __slots__ = ("closing", "deciding", "doubtful", "marks")

    def __init__(
        self, closing: str, *, others: Iterable[str] = (), doubtful: Iterable[str] = (), deciding: Iterable[str] = ()
    ) -> None:
        self.closing = closing
        self.doubtful = frozenset(doubtful)
        self.marks = Marks((closing, *others, *self.doubtful))
        self.deciding = Marks((closing, *deciding))


class Feed:
    """The text of one answer and the parts parsed from it.

    1. `kept <= at <= len(text)`; all text before `kept` was delivered, as a part or as the syntax around one.
    2. Blanks at the end of content or reasoning are held in `blanks` until the next text decides whether they count.
    """

    __slots__ = (
        "at", "blanks", "calls", "drops_blanks", "has_arguments", "has_content", "has_reasoning", "hidden", "is_broken", "is_over",
        "is_reasoning", "kept", "parts", "plain", "plain_kind", "stops", "takes_calls", "text", "tools",
    )  # fmt: skip

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None = None, *, takes_calls: bool = True) -> None:
        self.tools = dict(tools or {})
        """JSON schemas of the request's functions by name."""
        self.takes_calls = takes_calls
        self.stops = NO_MARKS
        """Marks of the tool family, which end an incomplete value."""
        self.hidden = NO_MARKS
        """Marks that never become content: special tokens."""
        self.text = ""
        self.at = 0
        self.kept = 0
        self.is_over = False
        self.parts: list[Part] = []
        self.blanks = ""
        self.drops_blanks = False
        """True if blanks before the next content are dropped, as after reasoning."""
        self.plain: re.Pattern[str] | None = None
        """While set, a piece without a match and without blanks at its end is one part unchanged (the fast path)."""
        self.plain_kind: Callable[[str], Part] = str
        self.has_content = False
        self.has_reasoning = False
        self.is_reasoning = False
        """True between reasoning's marks."""
        self.is_broken = False
        """True after a call that failed after its begin, until the next one begins."""
        self.calls = 0
        """Number of calls begun."""
        self.has_arguments = False
        """True if the last call has a parameter; see `parameters.py`."""

    # Used by AnswerParser.

    def add(self, text: str) -> None:
        """Appends text."""
        # Delivered text is dropped, so that a piece of a long answer costs no more than one of a short answer.
        self.text = self.text[self.kept :] + text
        self.at -= self.kept
        self.kept = 0

    def take_parts(self) -> list[Part]:
        """Returns the parts since the last call."""
        parts, self.parts = self.parts, []
        return parts

    # Delivery of parts.

    def _add(self, text: str, kind: Callable[[str], Part]) -> None:
        """Delivers content or reasoning, except blanks at its end."""
        text = self.blanks + text
        if self.drops_blanks:
            text = text.lstrip()
        delivered = text.rstrip()
        self.blanks = text[len(delivered) :]
        if not delivered:
            return
        self.drops_blanks = False
        self.parts.append(kind(delivered))
        if kind is Reasoning:
            self.has_reasoning = True
        else:
            self.has_content = True

    def drop_blanks(self) -> None:
        """Drops the held blanks: they are layout before the next part."""
        self.blanks = ""

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begins a call. All text up to the cursor is its syntax."""
        self.drop_blanks()
        self.parts.append(CallBegin(number=self.calls, name=name, call_id=call_id))
        self.calls += 1
        self.is_broken = self.has_arguments = False
        self.kept = self.at

    def add_arguments(self, text: str) -> None:
        """Delivers more arguments of the last call. They contain all text up to the cursor."""
        if text:
            self.parts.append(CallArguments(self.calls - 1, text))
        self.kept = self.at

    def to_arguments(self, text: str) -> Part:
        """Returns the part that `add_arguments` would deliver."""
        return CallArguments(self.calls - 1, text)

    def settle(self) -> None:
        """Marks all text up to the cursor as delivered, so that a later failure does not make it content."""
        self.kept = self.at

    def warn(self, reason: str) -> None:
        """Adds a warning for the client."""
        self.parts.append(Warned(reason))

    def reject(self, reason: str) -> None:
        """Delivers the text since the last delivery as content, with a warning if there is a reason."""
        # The answer is over, so its whole rest is content.
        if reason == TRUNCATED:
            self.at = len(self.text)
        text, self.kept = self.text[self.kept : self.at], self.at
        self._add(self.hidden.removed(text), str)
        if reason:
            self.warn(reason)

    # Reading. Each method moves the cursor after what it returns, and raises Malformed if the text does not match.

    def unexpected(self, *literals: str) -> Malformed:
        """Returns the error for text that is none of the expected literals: truncated at the end of the answer, else malformed."""
        rest = self.text[self.at :]
        is_cut = self.is_over and (not rest or any(literal.startswith(rest) for literal in literals))
        return Malformed(TRUNCATED if is_cut else MALFORMED)

    def wait(self, count: int = 1) -> Steps:
        """Waits until `count` characters are ahead. If the answer ends before, the call is truncated."""
        while len(self.text) - self.at < count:
            if self.is_over:
                raise Malformed(TRUNCATED)
            yield

    def peek(self) -> TextSteps:
        """Returns the next character without consuming it; empty at the end of the answer."""
        while self.at >= len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def has(self, literal: str) -> BoolSteps:
        """Returns whether `literal` is next, and consumes it if so."""
        while True:
            ahead = self.text[self.at : self.at + len(literal)]
            if ahead == literal:
                self.at += len(literal)
                return True
            if self.is_over or not literal.startswith(ahead):
                return False
            yield

    def expect(self, literal: str) -> Steps:
        """Consumes `literal`. Raises Malformed if other text follows."""
        if not (yield from self.has(literal)):
            raise self.unexpected(literal)

    def is_at_mark(self) -> BoolSteps:
        """Returns whether a mark of the family is next, without consuming it."""
        while not self.stops.is_at(self.text, self.at):
            # The text after the cursor may be the beginning of a mark.
            may_come = self.at == len(self.text) or self.stops.held(self.text, self.at) == self.at
            if self.is_over or not may_come:
                return False
            yield
        return True

    def skip_blanks(self) -> Steps:
        """Skips blanks. More than BLANKS_MAX are malformed: a model in a loop may write blanks without end."""
        skipped = 0
        while True:
            found = _BLANKS.match(self.text, self.at)
            assert found is not None, "the pattern matches nothing too"
            skipped += found.end() - self.at
            self.at = found.end()
            if skipped > BLANKS_MAX:
                # Back to the limit, so that the cursor does not depend on where pieces end.
                self.at -= skipped - BLANKS_MAX
                raise Malformed
            if self.at < len(self.text) or self.is_over:
                return
            yield

    def take_while(self, pattern: re.Pattern[str], characters_max: int = NAME_CHARACTERS_MAX) -> TextSteps:
        """Consumes characters while they match; may be none. More than `characters_max` are malformed."""
        length = 0
        while True:
            while self.at + length < len(self.text) and pattern.match(self.text[self.at + length]):
                length += 1
                if length > characters_max:
                    raise Malformed
            if self.at + length < len(self.text) or self.is_over:
                break
            yield
        taken = self.text[self.at : self.at + length]
        self.at += length
        return taken

    def take_until(self, marks: Marks, characters_max: int = HELD_CHARACTERS_MAX) -> TextSteps:
        """Consumes the text before the first mark. If the answer ends before a mark, the call is truncated."""
        ahead = 0
        while (found := marks.find(self.text, self.at + ahead)) is None:
            # The next search skips text that cannot belong to a mark.
            ahead = marks.held(self.text, self.at + ahead) - self.at
            if ahead > characters_max:
                raise Malformed
            if self.is_over:
                raise Malformed(TRUNCATED)
            yield
        if found[0] - self.at > characters_max:
            raise Malformed
        taken, self.at = self.text[self.at : found[0]], found[0]
        return taken

    def hold(self, pieces: list[str], characters_max: int = HELD_CHARACTERS_MAX) -> Emit:
        """Returns an emit function that collects pieces which cannot be delivered yet. More than `characters_max` are malformed."""
        length = 0

        def emit(text: str) -> None:
            nonlocal length
            length += len(text)
            if length > characters_max:
                # Moves the cursor back to the limit, so that its position does not depend on where pieces end.
                self.at -= length - characters_max
                raise Malformed
            pieces.append(text)

        return emit

    def wait_quickly(self, special: re.Pattern[str], to_part: ToPart | None) -> Steps:
        """Waits for more text. `to_part` converts a piece without a match to the part that reading it would give."""
        # The fast path bypasses the feed, so nothing may be held back.
        if to_part is not None and self.kept == len(self.text):
            self.plain, self.plain_kind = special, to_part
        yield
        self.plain = None

    def stream_until(
        self,
        marks: Marks,
        emit: Emit,
        quick: Callable[[], ToPart | None] = lambda: None,
        *,
        ends: ValueEnds | None = None,
    ) -> TextSteps:
        """Emits text as it comes, up to a mark. Returns the mark without consuming it; empty at the end of the answer.

        `quick` returns `to_part` of `wait_quickly`, before each wait. `ends`: decides which of the marks are text.
        """
        # Characters after the cursor that are text although they contain marks.
        text_characters = 0
        while True:
            found = marks.find(self.text, self.at + text_characters)
            end = found[0] if found else len(self.text) if self.is_over else marks.held(self.text, self.at)
            text, self.at = self.text[self.at : end], end
            self.kept = end
            if text:
                emit(text)
            if found and ends is not None and found[1] in ends.doubtful:
                text_characters = yield from self._text_before_end(found[1], ends)
                if text_characters:
                    continue
            if found or self.is_over:
                return found[1] if found else ""
            text_characters = 0
            yield from self.wait_quickly(marks.starts, quick())

    def _text_before_end(self, mark: str, ends: ValueEnds) -> Generator[None, None, int]:
        """Returns how many characters from the mark at the cursor to the value's end are text; 0 if the mark ends the value."""
        ahead = len(mark)
        while ahead <= HELD_CHARACTERS_MAX:
            found = ends.deciding.find(self.text, self.at + ahead)
            if found is not None:
                ahead = found[0] - self.at
                return ahead if found[1] == ends.closing and ahead <= HELD_CHARACTERS_MAX else 0
            if self.is_over:
                break
            ahead = ends.deciding.held(self.text, self.at + ahead) - self.at
            yield
        return 0

    def stream_plain(self, marks: Marks, kind: Callable[[str], Part]) -> TextSteps:
        """Does what `stream_until` does, for content and reasoning. Enables the fast path while nothing is held back."""
        self.is_reasoning = kind is Reasoning

        def quick() -> ToPart | None:
            has_text = self.has_reasoning if kind is Reasoning else self.has_content
            return kind if has_text and not self.blanks and not self.drops_blanks else None

        mark = yield from self.stream_until(marks, lambda text: self._add(text, kind), quick)
        self.is_reasoning = False
        return mark
