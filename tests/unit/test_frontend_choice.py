"""One choice of an answer: what is held back, and when its worker is stopped."""

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, LegFinish, Usage
from services.frontend.metrics import ModelGaps
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.request import Ending
from services.frontend.text.detokenise import Detokenisers
from services.frontend.text.stops import StopFinder
from tests.property.test_detokenise import byte_level

TOKENIZER = byte_level()
DETOKENISERS = Detokenisers(TOKENIZER)


class Heard:
    """An outlet that notes what it gets."""

    def __init__(self) -> None:
        self.text = ""
        self.endings: list[Ending] = []

    def on_text(self, choice, text, token_ids, logprobs) -> None:
        self.text += text

    def on_prompt(self, choice, entries) -> None:
        pass

    def on_end(self, choice, ending) -> None:
        self.endings.append(ending)


def a_choice(heard: Heard, cancelled: list[int], *stops: str) -> ChoiceSink:
    choice = ChoiceSink(
        0,
        heard,
        DETOKENISERS.detokeniser(skip_special_tokens=True),
        stops=StopFinder(stops),
        stop_ids=frozenset(),
        min_tokens=0,
        includes_stop=False,
        clock=SystemClock(),
        gaps=ModelGaps(),
        on_first=lambda: None,
        on_over=lambda *_: None,
    )
    choice.begin(lambda: cancelled.append(1))
    return choice


def say(choice: ChoiceSink, text: str) -> None:
    """The text, a token at a time."""
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        choice.on_tokens((token_id,), None, 0.0)


def test_a_stop_string_stops_the_worker_at_once() -> None:
    """Not when the other choices of the request end, which may go on for minutes."""
    heard, cancelled = Heard(), []
    choice = a_choice(heard, cancelled, "STOP")
    say(choice, "one two STOP three")
    assert heard.text == "one two "
    assert [ending.stop for ending in heard.endings] == ["STOP"]
    assert cancelled == [1]
    choice.close()
    assert cancelled == [1]


def test_what_only_looked_like_a_stop_is_shown_in_the_end() -> None:
    """An answer that ends with a stop string's beginning is whole."""
    heard, cancelled = Heard(), []
    choice = a_choice(heard, cancelled, "STOP")
    say(choice, "one two STO")
    assert heard.text == "one two "
    choice.on_finish(LegFinish(reason=FinishReason.LENGTH, usage=Usage()))
    assert heard.text == "one two STO"
    assert [ending.reason for ending in heard.endings] == [FinishReason.LENGTH]
    assert not cancelled


def test_half_a_character_is_not_dropped_by_a_whole_one() -> None:
    """A token that is whole by itself may not overtake bytes that wait for the rest of theirs."""
    detokeniser = DETOKENISERS.detokeniser(skip_special_tokens=True)
    [first, *_] = "日".encode()
    half = next(i for i in range(TOKENIZER.get_vocab_size()) if DETOKENISERS.token_bytes(i) == bytes([first]))
    whole = TOKENIZER.encode("a", add_special_tokens=False).ids
    assert detokeniser.whole()[whole[0]] == "a"
    assert detokeniser.push([half]) == ""
    assert not detokeniser.whole()
    assert detokeniser.push(whole) + detokeniser.flush() == "\N{REPLACEMENT CHARACTER}a"
    assert detokeniser.whole()[whole[0]] == "a"
