"""Compiling a constraint is bounded. It runs in a separate process, which is killed at the limits and when the request is cancelled."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from kvmesh.engines.vllm import grammar_check
from kvmesh.engines.vllm.grammar_check import GrammarChecker
from kvmesh.errors import InvalidRequestError, UnavailableError
from tests.integration.mesh import children_of, is_running
from tests.patience import PATIENCE_S

xgrammar = pytest.importorskip("xgrammar")
FIELD = "generation.sampling.constraint"


def ranged(count: int) -> str:
    """Returns a schema that takes xgrammar about a CPU-second for 400 fields."""
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i * 7} for i in range(count)}
    return json.dumps({"type": "object", "properties": fields, "required": list(fields)})


def tokenizer() -> str:
    vocabulary = [*map(chr, range(32, 127)), "</s>"]
    return str(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1]).serialize_json())


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer, cpu_s_max=1, wait_s_max=PATIENCE_S)
    yield checker
    await checker.aclose()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_slow_compilation_is_refused_without_blocking_the_loop(checker: GrammarChecker) -> None:
    """A compilation above the CPU limit is refused. Meanwhile the event loop runs, and the same process then compiles further constraints.

    Constraints that xgrammar does not accept pass, because vLLM decides about them.
    """
    await checker.check("regex", "[a-c]{3}", FIELD)
    process = checker._process
    assert process is not None
    # Stopped, so that the compilation cannot end before the event loop has run.
    process.send_signal(signal.SIGSTOP)
    checking = asyncio.create_task(checker.check("json", ranged(4000), FIELD))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not checking.done()
    process.send_signal(signal.SIGCONT)
    with pytest.raises(InvalidRequestError, match="more than 1 s of CPU time") as refusal:
        await checking
    assert (refusal.value.reason, refusal.value.field) == ("constraint_too_complex", FIELD)
    for kind, text in (("json", '{"type": "integer"}'), ("regex", "["), ("grammar", 'root ::= "yes"'), ("json", "{")):
        await checker.check(kind, text, FIELD)
    assert checker._process is process and not children_of(process.pid)


async def test_a_compilation_above_the_memory_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MEMORY_BYTES_MAX", 64 << 20)
    checker = GrammarChecker(tokenizer, cpu_s_max=60, wait_s_max=PATIENCE_S)
    try:
        with pytest.raises(InvalidRequestError) as refusal:
            await checker.check("json", ranged(4000), FIELD)
        assert refusal.value.reason == "constraint_too_complex"
        await checker.check("regex", "[a-c]{3}", FIELD)
    finally:
        await checker.aclose()


async def test_a_cancelled_request_stops_its_compilation() -> None:
    """Cancelling a request stops its compilation, which would otherwise delay the next one for a minute."""
    checker = GrammarChecker(tokenizer, cpu_s_max=3600, wait_s_max=3600)
    try:
        await checker.check("regex", "[a-c]{3}", FIELD)
        process = checker._process
        assert process is not None
        checking = asyncio.create_task(checker.check("json", ranged(20_000), FIELD))
        await until(lambda: children_of(process.pid))
        checking.cancel()
        await asyncio.wait({checking})
        await until(lambda: not children_of(process.pid))
        await checker.check("regex", "[a-c]{4}", FIELD)
        assert checker._process is process
    finally:
        await checker.aclose()


async def test_a_process_that_dies_fails_one_request(checker: GrammarChecker) -> None:
    await checker.check("regex", "[a-c]{3}", FIELD)
    process = checker._process
    assert process is not None
    checking = asyncio.create_task(checker.check("json", ranged(20_000), FIELD))
    await until(lambda: children_of(process.pid))
    (child,) = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        await checking
    # The child ends with its parent.
    await until(lambda: not is_running(child))
    await checker.check("regex", "[a-c]{3}", FIELD)
    assert checker._process is not process
