"""Random sampling parameters against real vLLM engines: no request may end an engine or change another one's answer.

    python -m tests.integration.vllm_fuzz --seconds 600 --seed 7      one engine, then a pair; prints each kind of refusal and all failures

Each round submits a batch of requests that vary one, two or many of the parameters that the API accepts, including extreme values, and then a
reference prompt whose tokens are known. The seed determines everything.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, LegTask, SamplingParams
from kvmesh.engines.vllm.registration import VLLM
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import InternalError, LostError, MeshError
from kvmesh.worker.fork_server import ForkServer
from tests.integration.vllm_drive import Drive, greedy, prompt
from tests.integration.vllm_model import VOCABULARY, add_tokenizer, make_adapter, make_model
from tests.integration.vllm_process import RemoteEngine

CONTEXT = 512
BATCH = 24
ANSWER_S = 90.0
"""The longest wait for one batch. It is not a measure of speed, but detects requests that never end."""
DEEP = 300


def nested(levels: int) -> str:
    schema: dict[str, Any] = {"type": "string", "maxLength": 2}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return json.dumps(schema)


SCHEMAS = (
    "{}", "true", "false", "[]", "1", "null", "{", '{"type": "nothing"}', '{"type": ["string", "null"]}', nested(5), nested(60),
    nested(DEEP), "[" * 2000 + "]" * 2000, '{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}', '{"$ref": "#/nowhere"}',
    '{"$ref": "http://127.0.0.1:1/x"}', '{"type": "array", "minItems": 10000}', '{"type": "array", "minItems": 5, "maxItems": 2}',
    '{"type": "string", "minLength": 5, "maxLength": 2}', '{"type": "string", "maxLength": 100000}',
    '{"type": "string", "pattern": "(a+)+$"}', '{"type": "string", "pattern": "("}', '{"type": "string", "format": "nothing"}',
    '{"type": "integer", "minimum": 5, "maximum": 2}', '{"type": "integer", "minimum": -1e300, "maximum": 1e300}',
    '{"type": "number", "multipleOf": 0}', '{"enum": []}', '{"enum": ["😀"]}', '{"const": null}', '{"anyOf": []}',
    '{"allOf": [{"type": "string"}, {"type": "integer"}]}', '{"not": {}}', json.dumps({"enum": [f"v{i}" for i in range(2000)]}),
    '{"type": "object", "patternProperties": {"(": {}}}', '{"type": "object", "minProperties": 3, "maxProperties": 1}',
    '{"type": "object", "required": ["missing"]}', '{"type": "object", "properties": []}', '{"type": 5}', "\\u0000", "",
)  # fmt: skip
REGEXES = (
    "", "a", "[a-c]{3}", "(a+)+$", "(a|aa)+b", "(a*)*b", ".{0,5000}", "a{1000}", "(((a{30}){30}){30})", "[^]", "[]", "(", ")", "*",
    "(?=a)b", "(?<!a)b", r"\1", r"(a)\1", r"\p{L}+", r"\x00", "😀", "^$", "(?i)a", "a" * 20_000, "(" * 3000 + ")" * 3000, "|", "a|", "[z-a]",
    "a{5,2}", "a{99999999999}", r"\d{1,4}-\w+", "(?P<n>a)(?P=n)", "[[:alpha:]]", "\\",
)  # fmt: skip
GRAMMARS = (
    "", " ", 'root ::= "a" | "b"', 'root ::= root "a" | "a"', "root ::= root", "root ::= missing", 'other ::= "a"', 'root ::= ""',
    'root ::= "😀"', "root ::=", "::=", 'root ::= "a"{5,2}', 'root ::= [^]', "root ::= (", 'start: "a"', "start: start", "%import x",
    'root ::= a\na ::= b\nb ::= a', "root ::= " + "(" * 2000 + '"a"' + ")" * 2000, 'root ::= "a"*' + ' "b"*' * 500,
)  # fmt: skip
TAGS = (
    "", "{}", "[]", "1", '{"type": "structural_tag"}', '{"type": "structural_tag", "format": {}}',
    '{"structures": [], "triggers": []}', '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]}',
    '{"structures": [{"begin": "<a>", "schema": {"type": 5}, "end": ""}], "triggers": ["x"]}', '{"structures": 1, "triggers": 1}',
    '{"type": "structural_tag", "format": {"type": "const_string", "value": ""}}',
    '{"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}',
)  # fmt: skip
CHOICES: Sequence[tuple[str, ...]] = (
    (), ("",), ("", ""), ("a",), ("yes", "no"), ("😀",), ("\x00",), ("a", "ab", "abc"), tuple(f"c{i}" for i in range(1000)), ("x" * 5000,),
    ('"', "\\", "\n"),
)  # fmt: skip


def constraints() -> Iterator[Constraint | None]:
    yield None
    yield Constraint(kind=ConstraintKind.JSON_OBJECT)
    for kind, texts in (
        (ConstraintKind.JSON_SCHEMA, SCHEMAS),
        (ConstraintKind.REGEX, REGEXES),
        (ConstraintKind.GRAMMAR, GRAMMARS),
        (ConstraintKind.STRUCTURAL_TAG, TAGS),
    ):
        for text in texts:
            yield Constraint(kind=kind, text=text)
    for options in CHOICES:
        yield Constraint(kind=ConstraintKind.CHOICE, options=options)


EVERYTHING = tuple((token, -100.0) for token in range(VOCABULARY))
VALUES: Mapping[str, Sequence[Any]] = {
    "temperature": (None, 0.0, 1e-300, 1e-9, 1e-5, 0.01, 1.0, 2.0),
    "top_p": (None, 1e-300, 1e-9, 0.5, 1.0),
    "top_k": (None, 0, 1, 2, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, 2**31 - 1),
    "min_p": (None, 0.0, 1e-9, 0.5, 1.0),
    "presence_penalty": (None, -2.0, 1e-9, 2.0),
    "frequency_penalty": (None, -2.0, 1e-9, 2.0),
    "repetition_penalty": (None, 1e-300, 1e-9, 0.1, 1.0, 10.0),
    "max_tokens": (1, 2, 8, 2**31 - 1),
    "min_tokens": (None, 0, 1, 2, 8),
    "seed": (None, -(2**63), -1, 0, 1, 2**31, 2**63 - 1),
    "logprobs": (None, 0, 1, 20),
    "prompt_logprobs": (None, 0, 1, 20),
    "stop_token_ids": ((), (0,), (1,), (VOCABULARY - 1,), tuple(range(64)), (5, 5)),
    "logit_bias": (
        (), ((5, 100.0),), ((1, 100.0),), ((1, -100.0),), EVERYTHING, EVERYTHING * 2, ((5, 1e-300), (5, 1.0)), ((VOCABULARY - 1, 0.0),),
    ),
    "ignore_eos": (False, True),
    "constraint": tuple(constraints()),
}  # fmt: skip
SHAPES: Mapping[str, Sequence[Any]] = {
    "length": (1, 2, 31, 32, 33, 64, 200, CONTEXT - 2, CONTEXT - 1, CONTEXT),
    "adapter": ("", "a", "b", "missing", "\x00", "x" * 1024),
    "cache_salt": ("", "x", "ä" * 128, "\n"),
    "priority": (-100, 0, 100),
    "emitted": (0, 1, 7),
    "tokens": ("usual", "equal", "special"),
}  # fmt: skip
NAMES = (*VALUES, *SHAPES)


@dataclass
class Found:
    """The results of a run."""

    requests: int = 0
    batches: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    is_dead: bool = False
    submit_s: float = 0.0
    slowest: str = ""


def choices(random: Random) -> Iterator[dict[str, Any]]:
    """Yields each value of each parameter, then values of each pair, then of many parameters at once, without end."""
    every = {**VALUES, **SHAPES}
    singles = [{name: value} for name, values in every.items() for value in values]
    random.shuffle(singles)
    yield from singles
    pairs = [{a: random.choice(every[a]), b: random.choice(every[b])} for a, b in combinations(NAMES, 2)]
    random.shuffle(pairs)
    yield from pairs
    while True:
        names = random.sample(NAMES, random.choice((2, 2, 3, 5, len(NAMES))))
        yield {name: random.choice(every[name]) for name in names}


def all_pairs() -> int:
    """Returns the number of pairs of values."""
    every = {**VALUES, **SHAPES}
    return sum(len(every[a]) * len(every[b]) for a, b in combinations(NAMES, 2))


def make_generation(choice: Mapping[str, Any], seed: int) -> Generation:
    """Returns a request with these values. Other parameters are those of a short sampled answer."""
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
    sampling |= {name: value for name, value in choice.items() if name in VALUES}
    length = choice.get("length", 20)
    tokens = {
        "usual": prompt(length, seed), "equal": [7] * length, "special": [index % 2 for index in range(length)]
    }[choice.get("tokens", "usual")]  # fmt: skip
    return Generation(
        model="m",
        token_ids=tokens,
        emitted_token_ids=prompt(choice.get("emitted", 0), seed + 1),
        adapter=choice.get("adapter", ""),
        cache_salt=choice.get("cache_salt", ""),
        priority=choice.get("priority", 0),
        sampling=SamplingParams(**sampling),
    )


class Fuzz:
    """Sends requests to one engine, or to a pair by handles."""

    def __init__(self, prefill: Drive | None, decode: Drive, seed: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._choices = choices(Random(seed))
        self.found = Found()
        self._reference = greedy(70, seed=1)
        self._expected: list[int] = []
        self._waiting: set[int] = set()

    async def run(self, batches: int) -> Found:
        """Runs so many batches, or fewer if an engine died."""
        if not self._expected:
            self._expected = (await self._decode.decode(self._reference)).tokens
        for _ in range(batches):
            batch = [next(self._choices) for _ in range(BATCH)]
            try:
                async with asyncio.timeout(ANSWER_S):
                    await asyncio.gather(*(self._ask(choice) for choice in batch))
                    await self._check(batch)
            except TimeoutError:
                self.found.is_dead = True
                waiting = [choice for choice in batch if id(choice) in self._waiting]
                self.found.broken.append(f"no answer to {waiting} of {batch}")
            except MeshError as error:
                self.found.is_dead = True
                self.found.broken.append(f"{error.reason} after {batch}")
            self.found.batches += 1
            if self.found.is_dead:
                break
        return self.found

    async def _ask(self, choice: Mapping[str, Any]) -> None:
        self._waiting.add(id(choice))
        await self._one(choice)
        self._waiting.discard(id(choice))

    async def _one(self, choice: Mapping[str, Any]) -> None:
        self.found.requests += 1
        generation = make_generation(choice, self.found.requests % 7)
        began = time.perf_counter()
        try:
            if self._prefill is None or generation.sampling.prompt_logprobs is not None:
                key = self._decode.submit(LegTask.GENERATE, generation, name=f"fuzz-{self.found.requests}")
                self._note_submit(began, choice)
                got = await self._decode.result(key, ANSWER_S)
            else:
                handle = (await self._prefill.prefill(generation)) if self.found.requests % 4 else None
                key = self._decode.submit(
                    LegTask.GENERATE, generation, handle=handle, name=f"fuzz-{self.found.requests}"
                )
                got = await self._decode.result(key, ANSWER_S)
        except LostError:
            raise
        except MeshError as error:
            self.found.outcomes[f"refused: {error.reason} {error.field} {error.message[:90]!r}"] += 1
            return
        assert got.finish is not None
        error = got.finish.error
        self.found.outcomes[
            got.finish.reason.value if error is None else f"{error.reason} {error.field} {error.message[:90]!r}"
        ] += 1
        if isinstance(error, InternalError) or got.finish.reason is FinishReason.CANCELLED:
            self.found.broken.append(f"{got.finish} for {choice}")
        if not all(0 <= token < VOCABULARY for token in got.tokens):
            self.found.broken.append(f"tokens {got.tokens} for {choice}")

    def _note_submit(self, began: float, choice: Mapping[str, Any]) -> None:
        took_s = time.perf_counter() - began
        if took_s > self.found.submit_s:
            self.found.submit_s, self.found.slowest = took_s, str(choice)[:200]

    async def _check(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Checks that the engines still answer, with the right tokens."""
        handle = await self._prefill.prefill(self._reference) if self._prefill is not None else None
        for got in (await self._decode.decode(self._reference), await self._decode.decode(self._reference, handle)):
            if got.tokens != self._expected:
                self.found.broken.append(f"{got.tokens}, not {self._expected}, after {batch}")


async def start(server: ForkServer, folder: Path, role: str, model: Path, **more: Any) -> Drive:
    """Starts an engine with adapters, a tokenizer and a small context."""
    settings = VllmSettings(
        model=str(model), role=role, dtype="float32", kv_cache_bytes=16 << 20, context_tokens_max=CONTEXT, enable_lora=True,
        step_tokens_max=256, adapters_running_max=2, **more,
    )  # fmt: skip
    drive = await Drive(RemoteEngine(server, settings, folder)).start()
    for index, name in enumerate("ab"):
        await drive.engine.load_adapter(name, str(folder / f"adapter-{index}"))
    return drive


def prepare(folder: Path) -> Path:
    """Writes a model and two adapters."""
    for index in range(2):
        make_adapter(folder / f"adapter-{index}", seed=index)
    return add_tokenizer(make_model(folder / "llama", context=CONTEXT))


async def main(seconds: float, seed: int) -> int:
    """Runs one engine and then a pair, each for half of the time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = prepare(folder)
        server = await ForkServer.start(VLLM.preload)
        status = 0
        for roles in (("decode",), ("prefill", "decode")):
            drives = [await start(server, folder, role, model) for role in roles]
            fuzz = Fuzz(drives[0] if len(drives) > 1 else None, drives[-1], seed)
            until_s = time.monotonic() + seconds / 2
            while time.monotonic() < until_s and not fuzz.found.is_dead:
                await fuzz.run(1)
            found = fuzz.found
            print(
                f"{'+'.join(roles)}: {found.requests} requests in {found.batches} batches; {all_pairs()} pairs of values exist"
            )
            print(f"  slowest submit {found.submit_s * 1000:.0f} ms: {found.slowest}")
            for outcome, times in found.outcomes.most_common():
                print(f"  {times:6} {outcome}")
            for text in found.broken:
                print(f"  BROKEN {text}")
                status = 1
            await asyncio.gather(*(drive.aclose() for drive in drives))
            if found.is_dead:
                for drive in drives:
                    print(await asyncio.to_thread(drive.remote.log.read_text))
        await server.aclose()
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os._exit(asyncio.run(main(options.seconds, options.seed)))
