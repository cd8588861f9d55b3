"""Marks around the answer behind the reasoning, as in `<think>...</think><response>...</response>`: they are left out."""

from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps


def answer_readers(opening: str, closing: str) -> dict[str, Reader]:
    """Readers by mark. Elsewhere than around the whole answer the marks are content."""
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
