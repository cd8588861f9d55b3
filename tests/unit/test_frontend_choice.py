"""One choice of a response: which text is held back, and when its worker is stopped."""

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


class RecordingOutlet:
    """Records the text and the endings of a choice."""

    def __init__(self) -> None:
        self.text = ""
        self.endings: list[Ending] = []

    def on_text(self, choice, text, token_ids, logprobs) -> None:
        self.text += text

    def on_prompt(self, choice, entries) -> None:
        pass

    def on_end(self, choice, ending) -> None:
        self.endings.append(ending)


def make_choice(outlet: RecordingOutlet, cancelled: list[int], *stops: str) -> ChoiceSink:
    choice = ChoiceSink(
        0,
        outlet,
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


def push_text(choice: ChoiceSink, text: str) -> None:
    """Pushes the tokens of the text one at a time."""
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        choice.on_tokens((token_id,), None, 0.0)


def test_a_stop_string_stops_the_worker_immediately() -> None:
    """A stop string cancels the leg immediately, and does not wait for the other choices of the request, which may run for minutes."""
    outlet, cancelled = RecordingOutlet(), []
    choice = make_choice(outlet, cancelled, "STOP")
    push_text(choice, "one two STOP three")
    assert outlet.text == "one two "
    assert [ending.stop for ending in outlet.endings] == ["STOP"]
    assert cancelled == [1]
    choice.close()
    assert cancelled == [1]


def test_the_start_of_a_stop_string_is_sent_at_the_end() -> None:
    """The held-back beginning of a stop string is sent when the answer ends with it."""
    outlet, cancelled = RecordingOutlet(), []
    choice = make_choice(outlet, cancelled, "STOP")
    push_text(choice, "one two STO")
    assert outlet.text == "one two "
    choice.on_finish(LegFinish(reason=FinishReason.LENGTH, usage=Usage()))
    assert outlet.text == "one two STO"
    assert [ending.reason for ending in outlet.endings] == [FinishReason.LENGTH]
    assert not cancelled


def test_a_complete_token_does_not_drop_a_partial_character() -> None:
    """A token that is complete by itself must not overtake bytes that wait for the rest of their character."""
    detokeniser = DETOKENISERS.detokeniser(skip_special_tokens=True)
    [first, *_] = "日".encode()
    half = next(i for i in range(TOKENIZER.get_vocab_size()) if DETOKENISERS.token_bytes(i) == bytes([first]))
    whole = TOKENIZER.encode("a", add_special_tokens=False).ids
    assert detokeniser.whole()[whole[0]] == "a"
    assert detokeniser.push([half]) == ""
    assert not detokeniser.whole()
    assert detokeniser.push(whole) + detokeniser.flush() == "\N{REPLACEMENT CHARACTER}a"
    assert detokeniser.whole()[whole[0]] == "a"
