"""vLLM's parsers in a separate process, used by the HTTP API."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import LostError, UnsupportedError
from services.frontend.parser_process.process import ParserProcess
from services.frontend.settings import FrontendSettings
from services.frontend.text.text_model import load_text_model
from tests.frontend_mesh import FakeMesh, served_model, tokens_of, write_model
from tests.integration.test_frontend_http import CHAT, Running, content, frontend
from tests.integration.test_frontend_parsers import BODY, deltas

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
ANSWER = '<think>Hm.</think>Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def write(directory: Path) -> Path:
    write_model(directory)
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@asynccontextmanager
async def answering(directory: Path, *, answers_max: int) -> AsyncIterator[tuple[Running, ParserProcess]]:
    """Runs a frontend whose model always answers ANSWER, with vLLM's hermes parser."""
    text = load_text_model(directory, SystemClock(), tool_parser="vllm:hermes")
    process = ParserProcess(directory, tool="hermes", reasoning="", answers_max=answers_max)
    await process.start()
    text.parser_process = process
    tokens = tokens_of(text, ANSWER)
    try:
        async with frontend([served_model(directory, text=text)], FakeMesh(answer=lambda _: tokens)) as running:
            yield running, process
    finally:
        await process.aclose()


@needs_vllm
async def test_vllm_reads_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are read whole and streamed, also after lost workers, and the number of concurrent answers is limited. If the process is killed,
    its requests fail, no session is left, and it restarts."""
    async with answering(write(tmp_path), answers_max=2) as (running, process):
        _, whole, _ = await running.post(CHAT, BODY)
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {
            "name": "get_weather",
            "arguments": '{"city": "Paris"}',
        }
        assert choice["message"]["content"].strip() == "<think>Hm.</think>Well."
        running.mesh.faults.legs = [(12, LostError("killed")), (3, LostError("killed"))]
        _, again, _ = await running.post(CHAT, BODY)
        assert again["choices"][0]["message"]["content"] == choice["message"]["content"]
        assert [call["function"] for call in again["choices"][0]["message"]["tool_calls"]] == [
            call["function"] for call in choice["message"]["tool_calls"]
        ]
        assert again["usage"] == whole["usage"] and not running.mesh.faults.legs
        events = await running.events(CHAT, BODY)
        assert content(events).strip() == "<think>Hm.</think>Well."
        calls = [each["tool_calls"][0] for each in deltas(events) if "tool_calls" in each]
        assert calls[0]["function"]["name"] == "get_weather"
        assert "".join(each["function"].get("arguments", "") for each in calls) == '{"city": "Paris"}'
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        status, answer, _ = await running.post(CHAT, BODY | {"n": 3})
        assert (status, answer["error"]["code"]) == (503, "parsers_full")
        assert process.sessions == 0
        running.mesh.step_s = 0.05
        may_restart, spawn = asyncio.Event(), process._spawn

        async def spawn_when_allowed() -> None:
            await may_restart.wait()
            await spawn()

        monkeypatch.setattr(process, "_spawn", spawn_when_allowed)
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status, answer, _ = await running.post(CHAT, BODY)
        assert (status, answer["error"]["code"]) in ((502, "parser_process_failed"), (503, "parser_process_failed"))
        status, answer, _ = await running.post(CHAT, BODY)
        assert (status, answer["error"]["code"]) == (503, "parser_process_failed")
        assert process.sessions == 0
        may_restart.set()
        async with asyncio.timeout(120):
            while not process.is_running:
                await asyncio.sleep(0.1)
        status, whole, _ = await running.post(CHAT, BODY)
        assert (status, whole["choices"][0]["finish_reason"]) == (200, "tool_calls")


@needs_vllm
async def test_unknown_vllm_parsers_are_refused(tmp_path: Path) -> None:
    """The error names the setting and lists vLLM's parsers."""
    process = ParserProcess(write(tmp_path), tool="nope", reasoning="", answers_max=9)
    with pytest.raises(UnsupportedError, match=r"vLLM has no parser 'nope'; it has .*hermes") as caught:
        await process.start()
    assert (caught.value.field, caught.value.reason) == ("tool_parser", "parser_unknown")
    assert process.pid is None


def test_without_vllm_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error at the start says that vLLM is not installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="tool_parser: vLLM's parsers need vllm, which is not installed"):
        FrontendSettings(tool_parser="vllm:hermes")


def test_vllms_parsers_cannot_be_mixed_with_ours(tmp_path: Path) -> None:
    """vLLM's process reads the whole answer, so one of our parsers beside it is an error."""
    with pytest.raises(UnsupportedError, match="reasoning_parser must be vllm:NAME or none if the other"):
        load_text_model(write(tmp_path), SystemClock(), tool_parser="vllm:hermes", reasoning_parser="qwen3")


async def test_text_after_the_process_died_is_dropped(tmp_path: Path) -> None:
    """Text that arrives after the process has died is dropped without an error."""
    process = ParserProcess(write(tmp_path), tool="hermes", reasoning="", answers_max=9)
    process.is_running = True  # Pretends that it runs, because loading vLLM takes seconds.
    received: list[Any] = []
    session = process.open_nowait(
        tools=[], parses_tools=True, prompt_ids=[], on_reply=received.append, on_failure=received.append
    )
    process.push_nowait(session, "late", [1], is_last=True)
    process.close_nowait(session)
    assert (received, process.sessions) == ([], 0)
