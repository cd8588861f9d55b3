"""The parts of the side-by-side run: what each measures, what counts in it, and what is aimed at."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.dynamo import DynamoKind
from bench.mesh import MeshKind
from bench.scenarios import FLAT_OUT, PACED, SIDE_BY_SIDE, Scenario

FLAT_OUT_SPEEDUP = 1_000_000
PACED_SPEEDUP = 1
SPEEDUPS = {FLAT_OUT.name: FLAT_OUT_SPEEDUP, PACED.name: PACED_SPEEDUP}
SHAPES = ("split", "single")
"""A prefill and a decode worker, or one worker that does both."""
MEMORY = "memory"
PARTS = (*SIDE_BY_SIDE, MEMORY)
CONTEXT_TOKENS = 32_768
NOISE = ("loop ms", "others")
FIGURES: Mapping[str, Sequence[str]] = {
    "stream": ("tokens per CPU-s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", *NOISE),
    "prompt": ("requests per CPU-s", "requests/s", "TTFT p50 ms", "TTFT p99 ms", *NOISE),
    "first": ("TTFT p50 ms", "TTFT p99 ms", "tokens per CPU-s", *NOISE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The ratio to reach on every row of a part, or, with `is_at_most`, not to pass."""

    part: str
    engines: str
    figure: str
    ratio: float
    is_at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        """Whether a row's ratio reaches it."""
        return ratio <= self.ratio if self.is_at_most else ratio >= self.ratio


TARGETS = (
    Target(part="stream", engines=FLAT_OUT.name, figure="tokens per CPU-s", ratio=1.5),
    Target(part="stream", engines=PACED.name, figure="tokens per CPU-s", ratio=2.0),
    Target(part="prompt", engines=FLAT_OUT.name, figure="requests per CPU-s", ratio=1.0),
    Target(part="first", engines=FLAT_OUT.name, figure="TTFT p50 ms", ratio=1.0, is_at_most=True),
    Target(part="first", engines=FLAT_OUT.name, figure="TTFT p99 ms", ratio=1.0, is_at_most=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """One start of each system, and the scenarios of each part that are measured on it."""

    name: str
    mesh: MeshKind
    dynamo: DynamoKind
    scenarios: Sequence[tuple[str, Scenario]]


def stands(parts: Sequence[str], shapes: Sequence[str], model_dir: Path, tokenizer: str) -> Iterator[Stand]:
    """Every shape with every engine that a chosen part wants; the parts share them."""
    for shape in shapes:
        for engines in (FLAT_OUT, PACED):
            scenarios = [
                (part, scenario)
                for part in parts
                for kind, rows in SIDE_BY_SIDE.get(part, ())
                if kind is engines
                for scenario in rows
            ]
            if scenarios:
                yield stand(engines, shape, model_dir, tokenizer, scenarios)


def stand(
    engines: MeshKind, shape: str, model_dir: Path, tokenizer: str, scenarios: Sequence[tuple[str, Scenario]] = ()
) -> Stand:
    """Both systems alike."""
    name, is_split = f"{engines.name}, {shape}", shape == "split"
    return Stand(
        name=name,
        mesh=replace(engines, name=name, model_dir=model_dir, prefills=1 if is_split else 0),
        dynamo=DynamoKind(
            name=name,
            speedup_ratio=SPEEDUPS[engines.name],
            model_dir=model_dir,
            is_split=is_split,
            tokenizer=tokenizer,
        ),
        scenarios=scenarios,
    )


def roomy_model(model_dir: Path, folder: Path) -> Path:
    """The same model with a context that the longest prompts fit into; nothing is computed, so nothing else changes."""
    made = folder / "model"
    made.mkdir()
    for path in model_dir.iterdir():
        if path.name not in ("config.json", "tokenizer_config.json"):
            (made / path.name).symlink_to(path.resolve())
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        body = json.loads((model_dir / name).read_text(encoding="utf-8"))
        body[key] = max(CONTEXT_TOKENS, body.get(key) or 0)
        (made / name).write_text(json.dumps(body), encoding="utf-8")
    return made
