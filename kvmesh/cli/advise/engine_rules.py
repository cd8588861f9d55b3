"""The rules that choose the engine. An engine that lacks a needed feature is out; among the others the points decide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.cli.advise.hardware import DEVICES
from kvmesh.cli.advise.needs import Needs
from kvmesh.cli.engine_flags.table import TITLES
from kvmesh.engines.registry import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Points for an engine if a condition holds. `reason` says why; `changes` says what would turn the rule around."""

    engine: str
    points: int
    applies: Callable[[Needs], bool]
    reason: str
    changes: str = ""


def _knows(engine: str) -> Callable[[Needs], bool]:
    return lambda needs: needs.team_engine == engine


RULES = (
    Rule(
        engine="vllm",
        points=2,
        applies=lambda needs: True,
        reason="vLLM's adapter has the most features with a test (docs/operate/support-matrix.md)",
    ),
    Rule(
        engine="vllm",
        points=1,
        applies=lambda needs: not DEVICES[needs.device].is_gpu,
        reason="vLLM has a build for CPUs; SGLang needs stand-ins for operators there, and TensorRT-LLM needs a GPU",
        changes="with GPUs this no longer speaks for vLLM",
    ),
    Rule(
        engine="vllm",
        points=3,
        applies=_knows("vllm"),
        reason="your team runs vLLM: its flags can be passed on (kvmesh translate-args --from vllm)",
    ),
    Rule(
        engine="sglang",
        points=3,
        applies=_knows("sglang"),
        reason="your team runs SGLang: its flags can be passed on (kvmesh translate-args --from sglang)",
        changes="a team without experience in SGLang gets vLLM",
    ),
    Rule(
        engine="sglang",
        points=1,
        applies=lambda needs: needs.shared_ratio >= 0.5,
        reason="at least half of each prompt is shared, and SGLang's radix cache shares prefixes from 16 tokens on",
        changes="with fewer shared prompts this no longer speaks for SGLang",
    ),
    Rule(
        engine="trtllm",
        points=1,
        applies=_knows("trtllm"),
        reason="your team runs TensorRT-LLM; kvmesh's adapter is written against its published API and has not run",
    ),
)
"""Facts: docs/operate/support-matrix.md, docs/engines/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine, why, what would change it, and why others are out: (engine, reason). `engine` empty: none has the features."""

    engine: str
    reasons: Sequence[str]
    changes: Sequence[str]
    removed: Sequence[tuple[str, str]]


def choose_engine(needs: Needs, features: Mapping[str, Sequence[str]] | None = None) -> EngineChoice:
    """Applies the rules. `features` are those of each engine that has an adapter; None: of the installed adapters."""
    known = installed_features() if features is None else features
    removed = [(engine, reason) for engine in TITLES if (reason := _missing(engine, needs, known))]
    out = {engine for engine, _ in removed}
    applied = [rule for rule in RULES if rule.engine not in out and rule.applies(needs)]
    points = {engine: sum(rule.points for rule in applied if rule.engine == engine) for engine in TITLES}
    best = max((engine for engine in TITLES if engine not in out), key=lambda engine: points[engine], default="")
    return EngineChoice(
        engine=best,
        reasons=[rule.reason for rule in applied if rule.engine == best],
        changes=[rule.changes for rule in applied if rule.changes],
        removed=removed,
    )


def installed_features() -> Mapping[str, Sequence[str]]:
    """Returns the features of each engine that has an adapter."""
    return {name: ENGINES[name].capabilities().features for name in TITLES if name in ENGINES}


def _missing(engine: str, needs: Needs, known: Mapping[str, Sequence[str]]) -> str:
    if engine not in known:
        return "kvmesh has no adapter for it yet"
    lacking = [feature for feature in needs.features if feature not in known[engine]]
    if lacking:
        return f"its adapter lacks {', '.join(lacking)}"
    if engine == "trtllm" and not DEVICES[needs.device].is_gpu:
        return "it needs an NVIDIA GPU"
    return ""
