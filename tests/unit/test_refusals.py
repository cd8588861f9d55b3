"""Every refusal for overload has a retry delay. Without one, all refused clients would retry at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUEST_PATH = ("kvmesh/rpc", "kvmesh/worker", "services")
"""The code on the path of a request. The registry and the adapters have other callers."""
STREAM_REASONS = frozenset({"link_stalled", "peer_behind"})
"""Reasons that end a stream between two processes. Clients never receive them."""


def refusals() -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Yields each place that creates an OverloadedError, with its keyword arguments."""
    for folder in REQUEST_PATH:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "OverloadedError":
                    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", named


def test_every_overload_refusal_has_a_retry_delay() -> None:
    """Each refusal sets `retry_after_s`, which becomes Retry-After and RetryInfo."""
    found = list(refusals())
    assert len(found) > 10
    silent = [
        place
        for place, named in found
        if "retry_after_s" not in named
        and not (isinstance(reason := named.get("reason"), ast.Constant) and reason.value in STREAM_REASONS)
    ]
    assert not silent
