"""Bounds of the feed's primitives depend on the text only: the cursor at a failure is the same for any split of the text."""

import re
from collections.abc import Callable, Sequence

import pytest

from services.frontend.parsers.feed import (
    BLANKS_MAX,
    HELD_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    Feed,
    Malformed,
    Steps,
)
from services.frontend.parsers.json_text import stream_container, stream_value, take_string
from services.frontend.parsers.marks import Marks, marks_of

WORD = re.compile(r"\w")
MARKS = Marks(("<end>", "<other>"))


def _take_words(feed: Feed) -> Steps:
    yield from feed.take_while(WORD)


def _take_until(feed: Feed) -> Steps:
    yield from feed.take_until(MARKS, NAME_CHARACTERS_MAX)


def _take_string(feed: Feed) -> Steps:
    yield from take_string(feed, NAME_CHARACTERS_MAX)


def _hold_value(feed: Feed) -> Steps:
    yield from stream_value(feed, feed.hold([]))


def _hold_container(feed: Feed) -> Steps:
    feed.stops = marks_of(frozenset(("<end>",)))
    yield from stream_container(feed, feed.hold([]))


def _string_with_a_mark(feed: Feed) -> Steps:
    feed.stops = marks_of(frozenset(("<end>",)))
    yield from take_string(feed, 2 * HELD_CHARACTERS_MAX)


Read = Callable[[Feed], Steps]
READS: Sequence[tuple[Read, str, int]] = (
    (Feed.skip_blanks, " " * (3 * BLANKS_MAX) + "x", BLANKS_MAX),
    (Feed.skip_blanks, " " * (BLANKS_MAX + 1) + "x", BLANKS_MAX),
    (Feed.skip_blanks, "\n" * BLANKS_MAX + "x", -1),
    (_take_words, "a" * (3 * NAME_CHARACTERS_MAX) + " ", 0),
    (_take_words, "a" * NAME_CHARACTERS_MAX + " ", -1),
    (_take_until, "a" * (3 * NAME_CHARACTERS_MAX) + "<end>", 0),
    (_take_until, "a" * (3 * NAME_CHARACTERS_MAX), 0),
    (_take_until, "a" * NAME_CHARACTERS_MAX + "<end>", -1),
    (_take_until, "a" * (NAME_CHARACTERS_MAX - 3) + "<en" + "a" * 9 + "<end>", 0),
    (_take_string, '"' + "a" * (3 * NAME_CHARACTERS_MAX) + '" ', NAME_CHARACTERS_MAX + 1),
    (_take_string, '"' + "\\u0041" * (3 * NAME_CHARACTERS_MAX) + '" ', 6 * (NAME_CHARACTERS_MAX + 1)),
    (_take_string, '"' + "\\u0041" * NAME_CHARACTERS_MAX + '" ', -1),
    (_hold_value, '"' + "a" * (2 * HELD_CHARACTERS_MAX) + '" ', HELD_CHARACTERS_MAX),
    (_hold_value, "[" + "1," * HELD_CHARACTERS_MAX + "1] ", HELD_CHARACTERS_MAX),
    (_hold_value, "1" * (3 * NAME_CHARACTERS_MAX) + " ", 0),
    (_hold_container, '{"a": "' + "a" * HELD_CHARACTERS_MAX + '<end>"} ', HELD_CHARACTERS_MAX),
    (_string_with_a_mark, '"<end>' + "a" * (HELD_CHARACTERS_MAX - 6) + '" ,', 1),
    (_string_with_a_mark, '"<end>' + "a" * (HELD_CHARACTERS_MAX - 7) + '",', -1),
    (_string_with_a_mark, '"<end>' + "a" * HELD_CHARACTERS_MAX + '",', 1),
)


def cursor(read: Read, pieces: Sequence[str]) -> int:
    """Returns the cursor's offset in the text when reading fails, or -1 if it succeeds."""
    feed = Feed()
    steps = read(feed)
    gone = 0
    try:
        next(steps)
        for piece in pieces:
            gone += feed.kept
            feed.add(piece)
            next(steps)
    except StopIteration:
        return -1
    except Malformed:
        return gone + feed.at
    raise AssertionError("the reader waits for more text after the end")


@pytest.mark.parametrize(("read", "text", "failed_at"), READS)
def test_bounds(read: Read, text: str, failed_at: int) -> None:
    """Reading fails exactly when a bound is exceeded, at the same cursor for pieces of any size."""
    for size in (len(text), 5000, 997):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert cursor(read, pieces) == failed_at, size
    if len(text) < HELD_CHARACTERS_MAX:
        assert cursor(read, text) == failed_at


def test_delivered_text_is_not_kept() -> None:
    """The feed keeps only text that is not delivered yet, so the memory of a long answer is bounded."""
    feed = Feed()
    for _ in range(1000):
        feed.add("0123456789")
        feed.at = len(feed.text)
        feed.settle()
    feed.add("x")
    assert feed.text == "x"
    assert (feed.kept, feed.at) == (0, 0)


def test_the_end_of_a_complete_mark_is_not_held() -> None:
    """A fence consists of equal characters. Its end is not held back as the beginning of another fence."""
    marks = Marks(("```", "<tool_call>"))
    text = "Paris```"
    assert [marks.held(text[:end], 0) for end in (6, 7, 8)] == [5, 5, 8]
    assert marks.held("```<tool", 0) == 3
    assert marks.held("````", 0) == 3
