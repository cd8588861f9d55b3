"""The parts of the side-by-side benchmark: what each measures, and its targets."""

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
"""`split`: a prefill and a decode worker. `single`: one worker with both roles."""
MEMORY = "memory"
PARTS = (*SIDE_BY_SIDE, MEMORY)
CONTEXT_TOKENS = 32_768
NOISE = ("loop ms", "others")
FIGURES: Mapping[str, Sequence[str]] = {
    "stream": ("tokens per CPU-s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", *NOISE),
    "arrivals": ("tokens per CPU-s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", *NOISE),
    "prompt": ("requests per CPU-s", "requests/s", "TTFT p50 ms", "TTFT p99 ms", *NOISE),
    "first": ("TTFT p50 ms", "TTFT p99 ms", "tokens per CPU-s", *NOISE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The ratio that every row of a part should reach or, with `is_at_most`, not exceed."""

    part: str
    engines: str
    figure: str
    ratio: float
    is_at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        """Returns whether a row's ratio meets the target."""
        return ratio <= self.ratio if self.is_at_most else ratio >= self.ratio


TARGETS = (
    Target(part="stream", engines=FLAT_OUT.name, figure="tokens per CPU-s", ratio=1.5),
    Target(part="stream", engines=PACED.name, figure="tokens per CPU-s", ratio=2.0),
    Target(part="arrivals", engines=PACED.name, figure="tokens per CPU-s", ratio=2.0),
    Target(part="prompt", engines=FLAT_OUT.name, figure="requests per CPU-s", ratio=1.0),
    Target(part="first", engines=FLAT_OUT.name, figure="TTFT p50 ms", ratio=1.0, is_at_most=True),
    Target(part="first", engines=FLAT_OUT.name, figure="TTFT p99 ms", ratio=1.0, is_at_most=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One start of each system, and the scenarios to measure on it by part."""

    name: str
    mesh: MeshKind
    dynamo: DynamoKind
    scenarios: Sequence[tuple[str, Scenario]]


def setups(parts: Sequence[str], shapes: Sequence[str], model_dir: Path, *, tokenizer: str) -> Iterator[Setup]:
    """Yields the setups for the chosen shapes and parts. Parts with the same engines share one."""
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
                yield setup(engines, shape, model_dir, tokenizer=tokenizer, scenarios=scenarios)


def setup(
    engines: MeshKind, shape: str, model_dir: Path, *, tokenizer: str, scenarios: Sequence[tuple[str, Scenario]] = ()
) -> Setup:
    """Returns a setup with the same shape for both systems."""
    name, is_split = f"{engines.name}, {shape}", shape == "split"
    return Setup(
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
    """Returns a copy of the model with a context length that fits the longest prompts. Nothing else changes, because no engine computes the
    model."""
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
