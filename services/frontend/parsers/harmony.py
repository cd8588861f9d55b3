"""Harmony (gpt-oss): an answer is messages, each `<|start|>role<|channel|>name<|message|>text<|end|>`; the prompt ends after
the first role.

The channel `analysis` is reasoning, `final` and `commentary` are content, and a message to `functions.name` is a call. Marks
after a channel's name: ` to=functions.name`, also before the channel, and ` <|constrain|>json`.
"""

import re

from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.feed import Feed, Malformed, Steps
from services.frontend.parsers.json_call import recorded_arguments
from services.frontend.parsers.json_text import is_object
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, TRUNCATED, UNKNOWN_TOOL, Reasoning

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
HEAD_CHARACTERS_MAX = 512
_ENDS = (END, RETURN, CALL)
_BODY_ENDS = Marks((*_ENDS, START))
_HEAD_ENDS = Marks((MESSAGE, *_ENDS))
_MARKS = Marks((START, CHANNEL, MESSAGE, *_ENDS))
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."


def read(feed: Feed) -> Steps:
    """Reads a whole answer. Text outside of messages is content."""
    # The prompt ends after the role, so the answer may begin in the middle of a head.
    if (yield from feed.has(" to=")):
        feed.at -= len(" to=")
        yield from _attempt(feed)
    while mark := (yield from feed.stream_plain(_MARKS, str)):
        if mark in _ENDS:
            feed.at += len(mark)
            feed.settle()
        else:
            yield from _attempt(feed)


def _attempt(feed: Feed) -> Steps:
    try:
        yield from _read_message(feed)
    except Malformed as error:
        if feed.at == feed.kept:
            # Makes progress: otherwise the same mark would be found again forever.
            feed.at = min(feed.at + 1, len(feed.text))
        feed.reject(error.reason)
    feed.settle()


def _read_message(feed: Feed) -> Steps:
    head = yield from feed.take_until(_HEAD_ENDS, HEAD_CHARACTERS_MAX)
    yield from feed.expect(MESSAGE)
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    target = recipient.group(1) if recipient else ""
    if target.startswith(_FUNCTION) and feed.takes_calls:
        yield from _read_call(feed, target.removeprefix(_FUNCTION))
    elif target:
        # A call to a recipient that the request does not have. Its head becomes content too, since it names the recipient.
        feed.reject(UNKNOWN_TOOL)
        yield from feed.stream_plain(_BODY_ENDS, str)
    else:
        feed.settle()
        yield from _read_text(feed, is_reasoning=channel is not None and channel.group(1) == "analysis")
    for end in _ENDS:
        if (yield from feed.has(end)):
            return


def _read_text(feed: Feed, *, is_reasoning: bool) -> Steps:
    kind = Reasoning if is_reasoning else str
    # Messages of the same kind become lines of one text.
    feed.blanks = "\n" if (feed.has_reasoning if is_reasoning else feed.has_content) else ""
    yield from feed.stream_plain(_BODY_ENDS, kind)
    if is_reasoning:
        feed.drop_blanks()


def _read_call(feed: Feed, name: str) -> Steps:
    feed.begin_call(name)
    pieces, emit, to_part = recorded_arguments(feed)
    mark = yield from feed.stream_until(_BODY_ENDS, emit, lambda: to_part)
    if not is_object("".join(pieces)):
        # A complete call may lack its mark too: tokens that end an answer are not in its text.
        feed.warn(ARGUMENTS_MALFORMED if mark else TRUNCATED)


FAMILY = WholeFamily(
    name="harmony",
    reader=read,
    special_marks=(START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL),
    template_marks=(CHANNEL,),
)
