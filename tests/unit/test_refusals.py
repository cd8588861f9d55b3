"""Every refusal for load says when to come back: clients that are not told come back at once, all together."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ON_THE_WAY = ("kvmesh/rpc", "kvmesh/worker", "services")
"""What a request passes. The registry and the adapters' calls have other callers."""
ENDS_OF_STREAMS = frozenset({"link_stalled", "peer_behind"})
"""Reasons that end a stream between two processes; no client sees them."""


def refusals() -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Every place that makes an OverloadedError, and its keyword arguments."""
    for folder in ON_THE_WAY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "OverloadedError":
                    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", named


def test_every_refusal_for_load_says_when_to_come_back() -> None:
    """With `retry_after_s`, which becomes Retry-After and RetryInfo."""
    found = list(refusals())
    assert len(found) > 10
    silent = [
        place
        for place, named in found
        if "retry_after_s" not in named
        and not (isinstance(reason := named.get("reason"), ast.Constant) and reason.value in ENDS_OF_STREAMS)
    ]
    assert not silent
