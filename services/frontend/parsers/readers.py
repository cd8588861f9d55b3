"""Readers that several families share."""

from services.frontend.parsers.feed import Feed, Reader, Steps


def section_reader(opening: str, read_call: Reader, closing: str, *, separator: str = "") -> Reader:
    """Returns a reader of a section of calls. It is entered after the section's opening mark and returns after its closing one.

    `opening`: the mark of each call; `read_call` continues after it. `separator`: a mark without meaning that may stand between
    calls. The closing mark may be missing after a whole call, at the end of the answer and before another mark.
    """

    def read(feed: Feed) -> Steps:
        begun = feed.calls
        while True:
            yield from feed.skip_blanks()
            if separator and (yield from feed.has(separator)):
                continue
            if not (yield from feed.has(opening)):
                break
            yield from read_call(feed)
            feed.settle()
        if (yield from feed.has(closing)):
            return
        if feed.calls == begun or ((yield from feed.peek()) and not (yield from feed.is_at_mark())):
            raise feed.unexpected(opening, closing)

    return read


def close_call(feed: Feed, closing: str) -> Steps:
    """Reads the closing mark of a whole call. Models leave it out at the end of the answer and before another mark."""
    yield from feed.skip_blanks()
    if (yield from feed.has(closing)) or not (yield from feed.peek()) or (yield from feed.is_at_mark()):
        return
    raise feed.unexpected(closing)
