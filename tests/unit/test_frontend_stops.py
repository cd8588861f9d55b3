"""Stop strings, compared with a reference that checks the whole text after every character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.text.stops import StopFinder

TEXTS = st.text(alphabet="ab\n ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns the text before the first stop string, and that stop string. Checks after each character whether the text ends with a stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_the_result_equals_the_references(pieces: list[str], stops: list[str]) -> None:
    """However the text is split, the output contains no part of the stop string and loses nothing."""
    finder = StopFinder(stops)
    shown = [finder.push(piece) for piece in pieces]
    shown.append(finder.flush())
    text, stop = reference_stop("".join(pieces), stops)
    assert "".join(shown) == text
    assert finder.matched == stop


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_only_possible_stops_are_held_back(pieces: list[str], stops: list[str]) -> None:
    """After each piece, the held-back text is the beginning of a stop string."""
    finder = StopFinder(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            break
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_long_stop_in_a_long_run_holds_back_a_bounded_text() -> None:
    """The held-back text is shorter than the stop string, however long the answer is."""
    finder = StopFinder(["a" * 255 + "b"])
    assert sum(len(finder.push("a" * 16)) for _ in range(1000)) >= 16_000 - 255


def test_a_stop_may_begin_inside_the_held_back_text() -> None:
    """If the stop's first character is repeated, the held-back text begins at the second one."""
    finder = StopFinder(["abc"])
    assert finder.push("xaa") == "xa"
    assert finder.push("b") == ""
    assert finder.push("cz") == ""
    assert finder.matched == "abc"
