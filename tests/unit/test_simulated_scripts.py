"""Constrained legs of the simulated engine write the same document in every way through the engine."""

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


def test_the_answer_is_exactly_the_document() -> None:
    """This holds with `ignore_eos` and `eos_after_tokens`, too. `max_tokens` truncates the document."""
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
def test_a_preempted_pulled_or_continued_document_is_the_same(per_step: int) -> None:
    """The document depends on prompt, seed and constraint only."""
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


def test_unconstrained_legs_are_not_affected() -> None:
    """An unconstrained leg in the same batch has its usual tokens."""
    own = bench()
    plain = Generation(model="demo", token_ids=[9, 8, 7], sampling=SamplingParams(max_tokens=30))
    own.submit(1, plain)
    own.submit(2, constrained([5, 6, 7]))
    own.run()
    assert own.tokens[1] == own.expected(plain)
    check(own, own.tokens[2])


def test_unsupported_constraints_are_refused() -> None:
    """Without a tokenizer, or for an invalid schema or continuation, the leg is refused and leaves no state behind."""
    with pytest.raises(UnsupportedError):
        Bench().submit(1, constrained([5]))
    own = bench()
    broken = SamplingParams(constraint=Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"type": 5}'))
    with pytest.raises((InvalidRequestError, UnsupportedError)):
        own.submit(1, Generation(model="demo", token_ids=[5], sampling=broken))
    assert own.scheduler.counts() == (0, 0, 0)
    with pytest.raises(InvalidRequestError):
        own.submit(1, constrained([5], emitted_token_ids=[7] * 150))


def test_structured_output_is_announced_only_with_a_tokenizer() -> None:
    """Otherwise routers would send requests that the engine refuses."""
    for folder, has in ((MODEL, True), ("", False)):
        features = SimulatedEngine(SimulatedSettings(model_dir=folder), SystemClock()).describe().capabilities.features
        assert ("structured_output" in features) is has
