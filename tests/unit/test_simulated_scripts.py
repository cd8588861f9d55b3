"""Constrained legs of the simulated engine: their document, whichever way they take through the engine."""

import json
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from kvmesh.clock import SystemClock
from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, LegTask, SamplingParams
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import InvalidRequestError, UnsupportedError
from tests.integration.mesh import ROOT
from tests.unit.test_simulated_scheduler import Bench, copy_kv

MODEL = str(ROOT / "models" / "demo")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 4}},
    "required": ["names"],
}
TOKENIZER = Tokenizer.from_file(f"{MODEL}/tokenizer.json")


def constrained(prompt: list[int], **changes: Any) -> Generation:
    sampling = SamplingParams(
        max_tokens=changes.pop("max_tokens", 200),
        constraint=Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
        **changes.pop("sampling", {}),
    )
    return Generation(model="demo", token_ids=prompt, sampling=sampling, **changes)


def bench(**changes: Any) -> Bench:
    return Bench(**{"model_dir": MODEL, "vocabulary_size": 0, "kv_blocks": 128, "context_tokens_max": 512, **changes})


def run(bench: Bench, generation: Generation, key: int = 1, **more: Any) -> list[int]:
    bench.submit(key, generation, **more)
    bench.run()
    return bench.tokens[key]


def check(bench: Bench, tokens: list[int]) -> None:
    assert tokens[-1] in bench.card.eos_token_ids
    jsonschema.validate(json.loads(TOKENIZER.decode(tokens[:-1])), SCHEMA)


def test_the_answer_is_the_document_and_ends_with_it() -> None:
    """Also where eos is to be ignored or the setting ends answers early; cut off by max_tokens it is a beginning."""
    own = bench(eos_after_tokens=3)
    tokens = run(own, constrained([5, 6, 7]))
    check(own, tokens)
    assert own.finishes[1].reason is FinishReason.STOP
    assert run(own, constrained([5, 6, 7], sampling={"ignore_eos": True}), key=2) == tokens
    assert run(own, constrained([5, 6, 7], max_tokens=9), key=3) == tokens[:9]
    assert own.finishes[3].reason is FinishReason.LENGTH


@pytest.mark.proves("structured_output", engine="simulated")
@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.proves("continued_structured_output", engine="simulated")
def test_preempted_and_pulled_and_continued_it_is_the_same(per_step: int) -> None:
    """The document depends on prompt, seed and constraint alone."""
    prompt = list(range(3, 40))
    expected = run(bench(), constrained(prompt))
    check(bench(), expected)
    tight = bench(kv_blocks=40, context_tokens_max=128, decode_tokens_per_step=per_step)
    others = [constrained(list(range(50 + 30 * i, 80 + 30 * i))) for i in range(3)]
    for key, generation in enumerate([constrained(prompt), *others], start=1):
        tight.submit(key, generation)
    tight.run(2000)
    assert tight.scheduler.preempted_total > 0
    assert tight.tokens[1] == expected
    for key in (2, 3, 4):
        check(tight, tight.tokens[key])
    source, target = bench(), bench()
    source.submit(1, constrained(prompt), task=LegTask.PREFILL)
    source.run()
    handle = source.finishes[1].handle
    assert handle is not None
    target.submit(1, constrained(prompt), handle=handle)
    target.step()
    copy_kv(source, target, target.pulls[0])
    assert target.scheduler.pull_ended(target.pulls[0], None)
    target.run()
    assert target.tokens[1] == expected
    for emitted in (1, 7, len(expected) - 1):
        continued = constrained(prompt, emitted_token_ids=expected[:emitted])
        assert run(bench(), continued) == expected[emitted:]


def test_plain_legs_beside_it_are_not_touched() -> None:
    """The arithmetic of the other legs goes on."""
    own = bench()
    plain = Generation(model="demo", token_ids=[9, 8, 7], sampling=SamplingParams(max_tokens=30))
    own.submit(1, plain)
    own.submit(2, constrained([5, 6, 7]))
    own.run()
    assert own.tokens[1] == own.expected(plain)
    check(own, own.tokens[2])


def test_what_cannot_be_written_is_refused() -> None:
    """Without a tokenizer, or for a document that is none; nothing is left behind."""
    with pytest.raises(UnsupportedError):
        Bench().submit(1, constrained([5]))
    own = bench()
    broken = SamplingParams(constraint=Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"type": 5}'))
    with pytest.raises((InvalidRequestError, UnsupportedError)):
        own.submit(1, Generation(model="demo", token_ids=[5], sampling=broken))
    assert own.scheduler.counts() == (0, 0, 0)
    with pytest.raises(InvalidRequestError):
        own.submit(1, constrained([5], emitted_token_ids=[7] * 150))


def test_the_record_claims_it_only_with_a_tokenizer() -> None:
    """So that no request is sent where it would be refused."""
    for folder, has in ((MODEL, True), ("", False)):
        features = SimulatedEngine(SimulatedSettings(model_dir=folder), SystemClock()).describe().capabilities.features
        assert ("structured_output" in features) is has
