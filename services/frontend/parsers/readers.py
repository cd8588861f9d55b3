"""Calls between the marks of a section, each behind a mark of its own."""

from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps
from services.frontend.parsers.parts import MALFORMED, TRUNCATED


def read_section(feed: Feed, opening: str, read_call: Reader, closing: str) -> Steps:
    """From behind the section's opening mark to behind its closing one. `opening`: the mark of a call, behind which
    `read_call` reads on. An answer may well end behind a whole call,
    and another section may begin."""
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
    """What is wrong at the cursor, where one of the literals was to come and none did: something else, or the end."""
    rest = feed.text[feed.at :]
    is_cut = feed.is_over and any(literal.startswith(rest) for literal in literals)
    return Malformed(TRUNCATED if is_cut else MALFORMED)
