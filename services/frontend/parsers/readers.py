"""Readers that several families share."""

from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps
from services.frontend.parsers.parts import MALFORMED, TRUNCATED


def read_section(feed: Feed, opening: str, read_call: Reader, closing: str) -> Steps:
    """Reads a section of calls. The cursor moves from behind the section's opening mark to behind its closing one.

    `opening`: the mark of each call; `read_call` reads on behind it. The answer may end behind a whole call, without the
    closing mark, and another section may begin there.
    """
    begun = feed.calls
    yield from feed.skip_blanks()
    while (yield from feed.has(opening)):
        yield from read_call(feed)
        feed.settle()
        yield from feed.skip_blanks()
    if (yield from feed.has(closing)):
        return
    if feed.calls > begun and ((yield from feed.is_at_mark()) or not (yield from feed.peek())):
        return
    raise unexpected(feed, opening, closing)


def unexpected(feed: Feed, *literals: str) -> Malformed:
    """Returns the error for a cursor at which none of the expected literals stands: other text, or the end of the answer."""
    rest = feed.text[feed.at :]
    is_cut = feed.is_over and any(literal.startswith(rest) for literal in literals)
    return Malformed(TRUNCATED if is_cut else MALFORMED)


def close_call(feed: Feed, close: str, following: str) -> Steps:
    """Reads the closing mark of a whole call. Models leave it out at the end of the answer and before the next call."""
    yield from feed.skip_blanks()
    if (yield from feed.has(close)):
        return
    if (yield from feed.has(following)):
        feed.at -= len(following)
    elif (yield from feed.peek()):
        raise Malformed


def answer_readers(opening: str, closing: str) -> dict[str, Reader]:
    """Returns readers that drop the marks around the answer behind the reasoning, as in `<think>...</think><response>...</response>`.

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
