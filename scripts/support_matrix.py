"""Writes docs/operate/support-matrix.md from the engines' capability records and the tests that run them; `--check` compares.

A cell is *verified* when the engine's record claims the feature and every test named for it exists and runs that engine,
*implemented* when the record claims it and no test runs it, *no* with the reason otherwise.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from kvmesh.core import Capabilities, Handoff, Role
from kvmesh.engines.registry import ENGINES

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "operate" / "support-matrix.md"
# The order of the columns. Engines that are not named here follow.
COLUMNS = tuple(dict.fromkeys(("vllm", "sglang", "trtllm", "simulated", *ENGINES)))
LATER = "no: later"
VLLM = "tests/integration/test_vllm_engine.py"
CONFORMANCE = "tests/conformance/test_engine.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A feature: the word in the record that claims it (or a rule), and the tests that run it, by engine or for both."""

    name: str
    word: str = ""
    both: tuple[str, ...] = ()
    by_engine: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ROWS = (
    Row(
        name="disaggregated serving",
        word="handoff:sequential",
        both=(f"{CONFORMANCE}::test_handed_off_prompt_gives_the_same_tokens",),
    ),
    Row(
        name="KV-aware routing (KV events)",
        word="kv_events",
        both=(f"{CONFORMANCE}::test_events_name_the_prompt_by_mesh_hashes", f"{CONFORMANCE}::test_eviction_is_told"),
    ),
    Row(
        name="request cancellation",
        word="always",
        both=(f"{CONFORMANCE}::test_decoding", f"{CONFORMANCE}::test_pulling"),
    ),
    Row(
        name="lost KV is computed again",
        word="handoff:sequential",
        both=(f"{CONFORMANCE}::test_dead_source", f"{CONFORMANCE}::test_foreign_compatibility_hash"),
    ),
    Row(
        name="continuing after emitted tokens (engine side)",
        word="always",
        both=(f"{CONFORMANCE}::test_continuation_gives_the_same_tokens",),
    ),
    Row(name="request migration (whole mesh)"),
    Row(name="logprobs", word="logprobs", both=(f"{CONFORMANCE}::test_logprobs",)),
    Row(
        name="LoRA",
        word="lora",
        by_engine={
            "vllm": (f"{VLLM}::test_an_adapter_changes_the_answer_and_is_handed_over",),
            "simulated": (f"{CONFORMANCE}::test_adapters",),
        },
    ),
    Row(name="tenant salt", word="always", both=(f"{CONFORMANCE}::test_salt_separates_tenants",)),
    Row(name="priority", word="priority", by_engine={"vllm": (f"{VLLM}::test_the_largest_priority_goes_first",)}),
    Row(name="seed", word="seed", by_engine={"vllm": (f"{VLLM}::test_sampling_reaches_the_engine",)}),
    Row(
        name="logit bias",
        word="logit_bias",
        by_engine={
            "vllm": (f"{VLLM}::test_sampling_reaches_the_engine",),
            "simulated": ("tests/unit/test_simulated_scheduler.py::test_a_bias_moves_the_answer",),
        },
    ),
    Row(
        name="structured output",
        word="structured_output",
        by_engine={
            "vllm": (f"{VLLM}::test_structured_output_and_its_refusal",),
            "simulated": (
                "tests/unit/test_simulated_scripts.py::test_preempted_and_pulled_and_continued_it_is_the_same",
            ),
        },
    ),
    Row(name="cache reset", word="reset_cache", both=(f"{CONFORMANCE}::test_reset_cache",)),
    Row(name="sleep and wake", word="sleep", by_engine={"simulated": (f"{CONFORMANCE}::test_asleep",)}),
    Row(name="role change in the engine", word="roles:2", both=(f"{CONFORMANCE}::test_set_role",)),
    Row(name="prompt logprobs", word="prompt_logprobs", both=(f"{CONFORMANCE}::test_prompt_logprobs",)),
    Row(
        name="embeddings",
        word="embeddings",
        by_engine={
            "vllm": (f"{VLLM}::test_embeddings_of_a_pooling_model",),
            "simulated": (f"{CONFORMANCE}::test_embeddings",),
        },
    ),
    Row(name="images", word="image"),
    Row(name="audio", word="audio"),
    Row(name="video", word="video"),
    Row(name="speculative decoding", word="speculative"),
    Row(name="KV tiers"),
    Row(name="data-parallel rank routing"),
    Row(name="multi-rank workers"),
    Row(name="SLA planner"),
)


def claims(record: Capabilities, word: str) -> bool:
    """Whether a record claims what a row's word stands for."""
    if word == "always":
        return True
    if word.startswith("handoff:"):
        return Handoff(word.removeprefix("handoff:")) in record.handoffs
    if word == "roles:2":
        return {Role.PREFILL, Role.DECODE} <= set(record.roles)
    return word in record.features


def missing_tests(tests: tuple[str, ...]) -> list[str]:
    """Tests that are named and do not exist."""
    absent = []
    for test in tests:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if not re.search(rf"def {name}\b", source):
            absent.append(test)
    return absent


def cell(row: Row, engine: str, record: Capabilities | None) -> str:
    """One cell."""
    if record is None:
        return "no: no adapter yet"
    if not row.word:
        return LATER
    if not claims(record, row.word):
        reason = ENGINES[engine].unsupported.get(row.word)
        return f"no: {reason}" if reason else LATER
    return "verified" if (*row.both, *row.by_engine.get(engine, ())) else "implemented"


def matrix() -> str:
    """The page."""
    known = {name: engine.capabilities() for name, engine in ENGINES.items()}
    lines = [
        "# Support matrix",
        "",
        "Generated by `scripts/support_matrix.py` from the engines' capability records.",
        "*verified*: a conformance test runs it on this engine; *implemented*: the adapter declares it, without a test on this engine;",
        "*no*: with the reason. The tests run vLLM on a CPU; its GPU path is written but was not run.",
        "",
        "| feature | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    lines += [f"| {row.name} | " + " | ".join(cell(row, e, known.get(e)) for e in COLUMNS) + " |" for row in ROWS]
    versions = ", ".join(f"{name} {record.engine_version}" for name, record in known.items())
    return "\n".join([*lines, "", f"Versions: {versions}.", ""])


def main() -> int:
    """Writes the page, or says how it differs."""
    absent = [test for row in ROWS for test in missing_tests((*row.both, *chain.from_iterable(row.by_engine.values())))]
    if absent:
        print("tests named in scripts/support_matrix.py do not exist: " + ", ".join(absent), file=sys.stderr)
        return 1
    page = matrix()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(page)
        return 0
    if not TARGET.exists() or TARGET.read_text() != page:
        print(
            "docs/operate/support-matrix.md is not what the capability records say; run scripts/support_matrix.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
