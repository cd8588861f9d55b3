"""Stop strings against a slow version that looks at the whole text after every character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.text.stops import StopFinder

TEXTS = st.text(alphabet="ab\n ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def slow(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The answer and the stop string: after each character, is there a stop at the end?"""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_same_as_the_slow_version(pieces: list[str], stops: list[str]) -> None:
    """Wherever the pieces' borders are; nothing is shown that is part of a stop, and nothing is lost."""
    finder = StopFinder(stops)
    shown = [finder.push(piece) for piece in pieces]
    shown.append(finder.flush())
    text, stop = slow("".join(pieces), stops)
    assert "".join(shown) == text
    assert finder.matched == stop


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_holds_back_only_what_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    """After each piece, what is held back begins some stop."""
    finder = StopFinder(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            break
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_long_stop_in_a_long_run_is_cheap() -> None:
    """Repeated beginnings are bounded by the stop's length, not the answer's."""
    finder = StopFinder(["a" * 255 + "b"])
    assert sum(len(finder.push("a" * 16)) for _ in range(1000)) >= 16_000 - 255


def test_a_stop_may_begin_later_in_what_is_held() -> None:
    """Its first character comes twice: what is held back begins at the second one."""
    finder = StopFinder(["abc"])
    assert finder.push("xaa") == "xa"
    assert finder.push("b") == ""
    assert finder.push("cz") == ""
    assert finder.matched == "abc"
