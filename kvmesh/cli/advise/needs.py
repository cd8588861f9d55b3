"""What the user of `kvmesh advise` needs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.cli.advise.hardware import DEVICES
from kvmesh.cli.engine_flags.table import TITLES
from kvmesh.core.worker import FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Model, hardware, traffic and targets. Rates are requests per second of the whole mesh."""

    model: str
    parameters_billions: float
    weight_bytes: float
    device: str
    devices: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    shared_ratio: float
    ttft_s: float
    itl_s: float
    features: Sequence[str]
    team_engine: str
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagQuestion:
    """A flag, and the question that is asked on a terminal without it."""

    name: str
    text: str
    default: Any
    convert: Callable[[str], Any]
    choices: Sequence[str] = ()


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """Returns a converter that checks the range."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:g}, not {text}")
        return value

    return convert


def names(text: str) -> Sequence[str]:
    """Features, separated by commas."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(set(found) - FEATURES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(FEATURES))}")
    return found


QUESTIONS = (
    FlagQuestion(name="model", text="model: directory or hub name", default="models/demo", convert=str),
    FlagQuestion(
        name="parameters-billions",
        text="parameters of the model in billions; 0: from its directory or name",
        default=0.0,
        convert=number(low=0, high=10_000),
    ),
    FlagQuestion(
        name="weight-bytes", text="bytes of a weight: 2, or 1 for 8 bits", default=2.0, convert=number(low=0.25, high=4)
    ),
    FlagQuestion(name="device", text="device", default="h100", convert=str, choices=tuple(DEVICES)),
    FlagQuestion(name="devices", text="number of devices", default=1, convert=number(low=1, high=4096, kind=int)),
    FlagQuestion(
        name="prompt-tokens",
        text="tokens of an average prompt",
        default=1024,
        convert=number(low=1, high=10_000_000, kind=int),
    ),
    FlagQuestion(
        name="output-tokens",
        text="tokens of an average answer",
        default=256,
        convert=number(low=1, high=1_000_000, kind=int),
    ),
    FlagQuestion(
        name="requests-per-s", text="requests per second", default=1.0, convert=number(low=0.001, high=1_000_000)
    ),
    FlagQuestion(
        name="shared-ratio",
        text="part of an average prompt that an earlier prompt began with, 0 to 1",
        default=0.3,
        convert=number(low=0, high=1),
    ),
    FlagQuestion(
        name="ttft-s", text="target: seconds to the first token", default=1.0, convert=number(low=0.001, high=3600)
    ),
    FlagQuestion(
        name="itl-s", text="target: seconds between two tokens", default=0.05, convert=number(low=0.0001, high=60)
    ),
    FlagQuestion(name="features", text="features that requests need, separated by commas", default=(), convert=names),
    FlagQuestion(
        name="team-engine",
        text="engine that your team runs today",
        default="none",
        convert=str,
        choices=("none", *TITLES),
    ),
    FlagQuestion(
        name="profile", text="measured profile of a worker, a JSON file; empty: data sheets", default="", convert=str
    ),
)


def read_needs(argv: Sequence[str]) -> Needs:
    """From flags; on a terminal it asks for the others. A wrong value ends the command with a message, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="kvmesh advise", description="Propose an engine, a layout and the command that starts it."
    )
    for each in QUESTIONS:
        parser.add_argument(
            f"--{each.name}", type=each.convert, choices=each.choices or None, help=f"{each.text} ({each.default or 0})"
        )
    parser.add_argument("--no-questions", action="store_true", help="take the defaults, also on a terminal")
    given = vars(parser.parse_args(argv))
    asks = not given.pop("no_questions") and sys.stdin.isatty()
    for each in QUESTIONS:
        key = each.name.replace("-", "_")
        if given[key] is None:
            given[key] = ask(each) if asks else each.default
    return Needs(**given)


def ask(question: FlagQuestion) -> Any:
    """Asks until the answer is valid; an empty line takes the default."""
    shown = f" ({', '.join(question.choices)})" if question.choices else ""
    while True:
        text = input(f"{question.text}{shown} [{question.default or 'none'}]: ").strip()
        if not text:
            return question.default
        try:
            value = question.convert(text)
        except argparse.ArgumentTypeError as error:
            print(error)
            continue
        if not question.choices or value in question.choices:
            return value
        print(f"must be one of {', '.join(question.choices)}")
