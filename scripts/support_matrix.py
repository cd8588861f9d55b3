"""Writes docs/operate/support-matrix.md from the engines' capability records and from the results of tests.

`make evidence` runs the tests that are marked with `proves` and passes their record with `--record FILE`, which the script stores in
`docs/operate/evidence.json`. `--merge FILE` adds the record of some tests to it instead. `--check` compares the page, and finds recorded tests
that no longer exist.

A cell is *verified* if the engine's record claims the feature and a test proved it on the engine's present version, *implemented* if the record
claims it without proof, and otherwise *no* with the reason.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kvmesh.core import Capabilities, Handoff, Role
from kvmesh.engines.registry import ENGINES
from kvmesh.engines.sampling_names import SAMPLING_NAMES, Names, NotCopied, Refused

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "operate" / "support-matrix.md"
EVIDENCE = ROOT / "docs" / "operate" / "evidence.json"
# The order of the columns. Engines that are not listed here follow.
COLUMNS = tuple(dict.fromkeys(("vllm", "sglang", "trtllm", "simulated", *ENGINES)))
LATER = "no: later"

Evidence = Mapping[str, Mapping[str, Sequence[str]]]
"""By engine, then by feature: the tests that proved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A feature, as tests name it. `word` is the entry of a capability record that claims it, or a rule. Empty: no engine can have it yet."""

    name: str
    feature: str
    word: str = ""


ROWS = (
    Row(name="disaggregated serving", feature="disaggregation", word="handoffs"),
    Row(name="KV-aware routing (KV events)", feature="kv_events", word="kv_events"),
    Row(name="request cancellation", feature="cancellation", word="always"),
    Row(name="lost KV is computed again", feature="recompute", word="handoff:sequential"),
    Row(name="continuing after emitted tokens (engine side)", feature="continuation", word="always"),
    Row(
        name="continuing with presence and frequency penalties",
        feature="continued_penalties",
        word="continued_penalties",
    ),
    Row(name="continuing with a seed", feature="continued_seed", word="continued_seed"),
    Row(
        name="continuing structured output",
        feature="continued_structured_output",
        word="continued_structured_output",
    ),
    Row(name="request migration (whole mesh)", feature="migration", word="always"),
    Row(name="logprobs", feature="logprobs", word="logprobs"),
    Row(name="LoRA", feature="lora", word="lora"),
    Row(name="tenant salt", feature="tenant_salt", word="always"),
    Row(name="priority", feature="priority", word="priority"),
    Row(name="seed", feature="seed", word="seed"),
    Row(name="logit bias", feature="logit_bias", word="logit_bias"),
    Row(name="structured output", feature="structured_output", word="structured_output"),
    Row(name="cache reset", feature="reset_cache", word="reset_cache"),
    Row(name="sleep and wake", feature="sleep", word="sleep"),
    Row(name="role change in the engine", feature="role_change", word="roles:2"),
    Row(name="prompt logprobs", feature="prompt_logprobs", word="prompt_logprobs"),
    Row(name="embeddings", feature="embeddings", word="embeddings"),
    Row(name="images", feature="image", word="image"),
    Row(name="audio", feature="audio", word="audio"),
    Row(name="video", feature="video", word="video"),
    Row(name="speculative decoding", feature="speculative", word="speculative"),
    Row(name="KV tiers", feature="kv_tiers"),
    Row(name="data-parallel rank routing", feature="data_parallel_ranks", word="data_parallel_ranks"),
    Row(name="multi-rank workers (one machine)", feature="multi_rank", word="multi_rank"),
    Row(name="multi-rank workers (several nodes)", feature="multi_node", word="multi_node"),
    Row(name="SLA planner", feature="planner", word="always"),
)


def claims(record: Capabilities, word: str) -> bool:
    """Returns whether a record claims the feature that a row's word stands for."""
    if word == "always":
        return True
    if word == "handoffs":
        return bool(record.handoffs)
    if word.startswith("handoff:"):
        return Handoff(word.removeprefix("handoff:")) in record.handoffs
    if word == "roles:2":
        return {Role.PREFILL, Role.DECODE} <= set(record.roles)
    return word in record.features


def cell(row: Row, engine: str, record: Capabilities | None, evidence: Evidence) -> str:
    """Returns one cell."""
    if record is None:
        return "no: no adapter yet"
    if not row.word:
        return LATER
    if not claims(record, row.word):
        reason = ENGINES[engine].unsupported.get(row.word)
        return f"no: {reason}" if reason else LATER
    return "verified" if evidence.get(_key(record), {}).get(row.feature) else "implemented"


def matrix(evidence: Evidence) -> str:
    """Returns the page."""
    known = {name: engine.capabilities() for name, engine in ENGINES.items()}
    lines = [
        "# Support matrix",
        "",
        "Generated by `scripts/support_matrix.py` from the engines' capability records and from what tests have proved.",
        "*verified*: a test, named below, passed on this version of the engine; *implemented*: the adapter declares it, without such a test;",
        "*no*: with the reason. The tests run vLLM and SGLang on a CPU; their GPU paths are written but were not run.",
        "",
        "| feature | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in ROWS:
        cells = [cell(row, engine, known.get(engine), evidence) for engine in COLUMNS]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {record.engine_version}" for name, record in known.items())
    return "\n".join([*lines, "", f"Versions: {versions}.", "", *_sampling_parameters(), *_proofs(evidence)])


def _sampling_parameters() -> Iterator[str]:
    engines = [each.name for each in fields(Names)]
    yield from ("## Sampling parameters", "")
    yield "What an engine gets, from `kvmesh/engines/sampling_names.py`: its own parameter in quotes, or a translation by the adapter."
    yield from ("The simulated engine ignores parameters that only change probabilities.", "")
    yield from ("| parameter | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|")
    for name, names in SAMPLING_NAMES.items():
        yield f"| `{name}` | " + " | ".join(_engine_parameter(getattr(names, each)) for each in engines) + " |"
    yield ""


def _engine_parameter(cell: str | NotCopied | Refused) -> str:
    if isinstance(cell, Refused):
        return f"no: {cell.reason}"
    return f"`{cell}`" if isinstance(cell, str) else cell.value


def _proofs(evidence: Evidence) -> Iterator[str]:
    yield from ("## Tests", "", "`make evidence` runs them and records which passed.", "")
    yield from ("| feature | engine | tests |", "|---|---|---|")
    for row in ROWS:
        for engine, features in evidence.items():
            if tests := features.get(row.feature):
                yield f"| {row.name} | {engine} | " + ", ".join(f"`{test}`" for test in tests) + " |"
    yield ""


def _key(record: Capabilities) -> str:
    return f"{record.engine} {record.engine_version}"


def record_evidence(lines: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Returns what a run has proved, from the lines that tests/evidence.py wrote.

    Omits a feature if a test of it failed, or if the engine does not claim it, because some tests then check that it is refused. Raises
    ValueError for features without a row.
    """
    keys = {name: _key(engine.capabilities()) for name, engine in ENGINES.items()}
    rows = {row.feature: row for row in ROWS}
    entries = [json.loads(line) for line in lines]
    failed = {(each["engine"], each["feature"]) for each in entries if not each["passed"]}
    found: dict[str, dict[str, set[str]]] = {}
    for each in entries:
        engine, feature = each["engine"], each["feature"]
        if feature not in rows:
            raise ValueError(f"{each['test']} proves {feature}, which has no row in the matrix")
        is_claimed = claims(ENGINES[engine].capabilities(), rows[feature].word)
        if is_claimed and (engine, feature) not in failed:
            found.setdefault(keys[engine], {}).setdefault(feature, set()).add(each["test"])
    return {key: {name: sorted(found[key][name]) for name in sorted(found[key])} for key in sorted(found)}


def merged(before: Evidence, found: Evidence) -> dict[str, dict[str, list[str]]]:
    """Returns both records as one. Engines and features are sorted, as in a complete record."""
    result: dict[str, dict[str, list[str]]] = {}
    for engine in sorted({*before, *found}):
        old, new = before.get(engine, {}), found.get(engine, {})
        names = sorted({*old, *new})
        result[engine] = {name: sorted({*old.get(name, ()), *new.get(name, ())}) for name in names}
    return result


def missing_tests(evidence: Evidence) -> list[str]:
    """Returns the recorded tests that no longer exist."""
    tests = {test for features in evidence.values() for each in features.values() for test in each}
    return sorted(test for test in tests if not _exists(test))


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    return re.search(rf"def {name.rpartition('::')[2]}\b", source) is not None


def main() -> int:
    """Writes the page and the record. With `--check`, returns 1 if the page is out of date or a recorded test does not exist."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["--record"], ["--merge"]):
        found = record_evidence(Path(arguments[1]).read_text().splitlines())
        if arguments[0] == "--merge":
            found = merged(json.loads(EVIDENCE.read_text()), found)
        EVIDENCE.write_text(json.dumps(found, indent=1) + "\n")
    evidence = json.loads(EVIDENCE.read_text())
    if absent := missing_tests(evidence):
        print(f"recorded tests do not exist; run make evidence: {', '.join(absent)}", file=sys.stderr)
        return 1
    page = matrix(evidence)
    if "--check" not in arguments:
        TARGET.write_text(page)
    elif not TARGET.exists() or TARGET.read_text() != page:
        print("docs/operate/support-matrix.md is out of date; run scripts/support_matrix.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
