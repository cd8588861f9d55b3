"""The text of one answer, as readers see it: a cursor in a text that grows.

Every primitive's result depends on the text alone and not on where pieces ended: it yields until the text decides, or until
the answer is over. What is behind `kept` was delivered; when reading fails, the text from `kept` to the cursor is content.
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
Found = Generator[None, None, str]
Asked = Generator[None, None, bool]
Reader = Callable[["Feed"], "Steps"]
Emit = Callable[[str], None]
ToPart = Callable[[str], Part]

HELD_CHARACTERS_MAX = 65_536
"""Longest text that a reader may hold back before it knows what it is; longer ones are content."""
NAME_CHARACTERS_MAX = 256
BLANKS_MAX = 1024
_BLANKS = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the reader reads. An empty `reason` says that it did not even look like a call."""

    def __init__(self, reason: str = MALFORMED) -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupted(Malformed):
    """A mark of the family stands where a value of a call is not whole yet; the cursor is at the mark."""


class Doubts:
    """Marks that a value without quotes may hold as text. One of them is text if the value's own end is the next of the
    deciding marks; else the value's end is missing, and the mark ends it.

    `marks`: those in doubt. `end`: the value's own end. `others`: further marks that decide, since a value holds none of them.
    """

    __slots__ = ("deciding", "end", "marks")

    def __init__(self, marks: Iterable[str], *, end: str, others: Iterable[str]) -> None:
        self.marks = frozenset(marks)
        self.end = end
        self.deciding = Marks((end, *others))


class Feed:
    """One answer's text and the parts made of it.

    1. `kept <= at <= len(text)`; all text before `kept` was delivered, as a part or as the syntax around one.
    2. Blanks at the end of content or reasoning wait in `blanks` until it is known what follows them.
    """

    __slots__ = (
        "_calls", "at", "blanks", "drops_blanks", "has_content", "has_reasoning", "hidden", "is_broken", "is_over", "is_reasoning", "kept",
        "parts", "plain", "plain_kind", "stops", "takes_calls", "text", "tools",
    )  # fmt: skip

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None = None, *, takes_calls: bool = True) -> None:
        self.tools = dict(tools or {})
        """The request's functions: the JSON schema of the parameters by name."""
        self.takes_calls = takes_calls
        self.stops = NO_MARKS
        """The tool family's marks: they end a value that is not whole."""
        self.hidden = NO_MARKS
        """Marks that never become content: special tokens."""
        self.text = ""
        self.at = 0
        self.kept = 0
        self.is_over = False
        self.parts: list[Part] = []
        self.blanks = ""
        self.drops_blanks = False
        """True where blanks before the next content say nothing: behind reasoning."""
        self.plain: re.Pattern[str] | None = None
        """While set, a piece without a match and without blanks at its end is one part as it is (the quick path)."""
        self.plain_kind: Callable[[str], Part] = str
        self.has_content = False
        self.has_reasoning = False
        self.is_reasoning = False
        """True between reasoning's marks."""
        self.is_broken = False
        """True behind a call that went wrong after it had begun, until the next one begins."""
        self._calls = 0

    @property
    def calls(self) -> int:
        """Calls begun."""
        return self._calls

    # What the driver does.

    def add(self, text: str) -> None:
        """More text."""
        self.text = self.text[self.kept :] + text
        self.at -= self.kept
        self.kept = 0

    def take_parts(self) -> list[Part]:
        """The parts made since the last time."""
        parts, self.parts = self.parts, []
        return parts

    # Delivering.

    def add_content(self, text: str) -> None:
        """Content, but for blanks at its end."""
        self._add(text, str)

    def add_reasoning(self, text: str) -> None:
        """Reasoning, but for blanks at its end."""
        self._add(text, Reasoning)

    def _add(self, text: str, kind: Callable[[str], Part]) -> None:
        text = self.blanks + text
        if self.drops_blanks:
            text = text.lstrip()
        said = text.rstrip()
        self.blanks = text[len(said) :]
        if not said:
            return
        self.drops_blanks = False
        self.parts.append(kind(said))
        if kind is Reasoning:
            self.has_reasoning = True
        else:
            self.has_content = True

    def drop_blanks(self) -> None:
        """Forgets the blanks that wait: they are layout around what comes now."""
        self.blanks = ""

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call; all text up to the cursor was its syntax."""
        self.drop_blanks()
        self.parts.append(CallBegin(self._calls, name, call_id))
        self._calls += 1
        self.is_broken = False
        self.kept = self.at

    def add_arguments(self, text: str) -> None:
        """More of the last call's arguments; all text up to the cursor is in them."""
        if text:
            self.parts.append(CallArguments(self._calls - 1, text))
        self.kept = self.at

    def to_arguments(self, text: str) -> Part:
        """What `add_arguments` would have made."""
        return CallArguments(self._calls - 1, text)

    def settle(self) -> None:
        """All text up to the cursor was syntax of what was delivered: should reading fail from here on, it is no content."""
        self.kept = self.at

    def warn(self, reason: str) -> None:
        """Tells the client that something was wrong."""
        self.parts.append(Warned(reason))

    def reject(self, reason: str) -> None:
        """What was read since the last delivery is content after all."""
        if reason == TRUNCATED:
            self.at = len(self.text)
        text, self.kept = self.text[self.kept : self.at], self.at
        self.add_content(self.hidden.removed(text))
        if reason:
            self.warn(reason)

    # Reading: each moves the cursor behind what it returns, and raises Malformed when that is not there.

    def wait(self, count: int = 1) -> Steps:
        """Until `count` characters are ahead. The answer's end before that is a truncated call."""
        while len(self.text) - self.at < count:
            if self.is_over:
                raise Malformed(TRUNCATED)
            yield

    def peek(self) -> Found:
        """The next character, which stays; empty at the end of the answer."""
        while self.at >= len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def has(self, literal: str) -> Asked:
        """Whether `literal` is next; only then the cursor moves."""
        while True:
            ahead = self.text[self.at : self.at + len(literal)]
            if ahead == literal:
                self.at += len(literal)
                return True
            if self.is_over or not literal.startswith(ahead):
                return False
            yield

    def expect(self, literal: str) -> Steps:
        """`literal` and nothing else."""
        if not (yield from self.has(literal)):
            is_cut = self.is_over and literal.startswith(self.text[self.at :])
            raise Malformed(TRUNCATED if is_cut else MALFORMED)

    def is_at_mark(self) -> Asked:
        """Whether a mark of the family is next; the cursor stays."""
        while not self.stops.is_at(self.text, self.at):
            may_come = self.at == len(self.text) or self.stops.held(self.text, self.at) == self.at
            if self.is_over or not may_come:
                return False
            yield
        return True

    def skip_blanks(self) -> Steps:
        """Blanks, if any. Models that got lost write them without end: too many are malformed."""
        skipped = 0
        while True:
            found = _BLANKS.match(self.text, self.at)
            assert found is not None, "the pattern matches nothing too"
            skipped += found.end() - self.at
            self.at = found.end()
            if skipped > BLANKS_MAX:
                self.at -= skipped - BLANKS_MAX
                raise Malformed
            if self.at < len(self.text) or self.is_over:
                return
            yield

    def take_while(self, pattern: re.Pattern[str], characters_max: int = NAME_CHARACTERS_MAX) -> Found:
        """The longest text whose every character matches; may be empty. Too long a text is malformed."""
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

    def take_until(self, marks: Marks, characters_max: int = HELD_CHARACTERS_MAX) -> Found:
        """The text before the first mark, which stays. The answer's end before that is a truncated call."""
        ahead = 0
        while (found := marks.find(self.text, self.at + ahead)) is None:
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
        """What keeps pieces that cannot be delivered yet; too many characters are malformed."""
        length = 0

        def emit(text: str) -> None:
            nonlocal length
            length += len(text)
            if length > characters_max:
                # The cursor goes back to the limit, so that it is where it would be had the text come in other pieces.
                self.at -= length - characters_max
                raise Malformed
            pieces.append(text)

        return emit

    def wait_quickly(self, special: re.Pattern[str], to_part: ToPart | None) -> Steps:
        """Until there is more text. `to_part`: makes of a piece without a match what reading it would have made."""
        if to_part is not None and self.kept == len(self.text):
            self.plain, self.plain_kind = special, to_part
        yield
        self.plain = None

    def stream_until(
        self,
        marks: Marks,
        emit: Emit,
        quick: Callable[[], ToPart | None] = lambda: None,
        doubts: "Doubts | None" = None,
    ) -> Found:
        """Hands text out as it comes, up to a mark, which stays and is returned; empty at the end of the answer. `quick`: see
        `wait_quickly`; it is asked each time. `doubts`: which of the marks may be text."""
        text_characters = 0
        while True:
            found = marks.find(self.text, self.at + text_characters)
            end = found[0] if found else len(self.text) if self.is_over else marks.held(self.text, self.at)
            text, self.at = self.text[self.at : end], end
            self.kept = end
            if text:
                emit(text)
            if found and doubts is not None and found[1] in doubts.marks:
                text_characters = yield from self._text_before_end(found[1], doubts)
                if text_characters:
                    continue
            if found or self.is_over:
                return found[1] if found else ""
            text_characters = 0
            yield from self.wait_quickly(marks.starts, quick())

    def _text_before_end(self, mark: str, doubts: "Doubts") -> Generator[None, None, int]:
        """How many characters from the mark at the cursor to the value's end are text; 0 if the mark ended the value."""
        ahead = len(mark)
        while ahead <= HELD_CHARACTERS_MAX:
            found = doubts.deciding.find(self.text, self.at + ahead)
            if found is not None:
                ahead = found[0] - self.at
                return ahead if found[1] == doubts.end and ahead <= HELD_CHARACTERS_MAX else 0
            if self.is_over:
                break
            ahead = doubts.deciding.held(self.text, self.at + ahead) - self.at
            yield
        return 0

    def stream_plain(self, marks: Marks, kind: Callable[[str], Part]) -> Found:
        """`stream_until` for content and reasoning, with the quick path open while nothing is held back."""
        self.is_reasoning = kind is Reasoning
        while True:
            found = marks.find(self.text, self.at)
            end = found[0] if found else len(self.text) if self.is_over else marks.held(self.text, self.at)
            if end > self.at:
                self._add(self.text[self.at : end], kind)
            self.at = self.kept = end
            if found or self.is_over:
                self.is_reasoning = False
                return found[1] if found else ""
            has_said = self.has_reasoning if kind is Reasoning else self.has_content
            if has_said and end == len(self.text) and not self.blanks and not self.drops_blanks:
                self.plain, self.plain_kind = marks.starts, kind
            yield
            self.plain = None
