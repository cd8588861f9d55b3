"""Finds out within a limit whether a constraint can be compiled, before vLLM compiles it.

vLLM compiles in threads, which nothing can stop. So a constraint is first compiled in a process (`grammar_process.py`) that is killed at
a limit of CPU time or memory. The process starts with the first constraint that needs it.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvmesh.errors import InvalidRequestError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)
MODULE = "kvmesh.engines.vllm.grammar_process"
REPLY_BYTES_MAX = 65_536
START_TIMEOUT_S = 120.0
"""It imports torch."""


MEMORY_BYTES_MAX = 2 << 30
"""Memory for compiling one constraint, so that it cannot take that of the worker."""


class GrammarChecker:
    """Compiles one constraint at a time; the caller waits for its turn.

    `cpu_s_max` limits the CPU time of each, `wait_s_max` the wait for it. `tokenizer` returns xgrammar's serialised TokenizerInfo; it is
    called in a thread.
    """

    def __init__(self, tokenizer: Callable[[], str], *, cpu_s_max: int, wait_s_max: float) -> None:
        self._cpu_s_max = cpu_s_max
        self._wait_s_max = wait_s_max
        self._tokenizer = tokenizer
        self._process: Process | None = None
        self._number = 0

    async def check(self, kind: str, text: str, field: str) -> None:
        """Returns when the constraint has been compiled, or xgrammar has refused it. Cancelling it stops the compilation.

        Raises InvalidRequestError at the limits, OverloadedError if the process got too little CPU, UnavailableError without the process.
        """
        process = await self._running()
        self._number += 1
        number = self._number
        message = {"id": number, "kind": kind, "text": text, "cpu_s": self._cpu_s_max, "bytes": MEMORY_BYTES_MAX}
        try:
            _write(process, message)
            async with asyncio.timeout(self._wait_s_max):
                outcome = await self._outcome(process, number)
        except TimeoutError:
            _write(process, {"cancel": number})
            raise OverloadedError(
                "the constraint was not compiled in time", reason="constraint_timeout", retry_after_s=1.0
            ) from None
        except asyncio.CancelledError:
            _write(process, {"cancel": number})
            raise
        if outcome == "stopped":
            limit = f"{self._cpu_s_max} s of CPU time or {MEMORY_BYTES_MAX} bytes"
            message_text = f"{field} is too complex: compiling it takes more than {limit}"
            raise InvalidRequestError(message_text, field=field, reason="constraint_too_complex")

    async def _outcome(self, process: Process, number: int) -> str:
        """Returns the outcome of this constraint. Answers for earlier ones, which were cancelled, are skipped."""
        while True:
            answer = await self._read(process)
            if answer.get("id") == number:
                return str(answer["outcome"])

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        tokenizer = await asyncio.to_thread(self._tokenizer)
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=PIPE,
            stdout=PIPE,
            limit=REPLY_BYTES_MAX,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            _write(process, {"tokenizer": tokenizer})
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read(process)
        except BaseException as error:
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise UnavailableError("the grammar process did not start", reason="grammar_process_failed") from error
            raise
        _log.info("grammar_process_started", pid=process.pid)
        return process

    async def _read(self, process: Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            await self.aclose()
            raise UnavailableError("the grammar process has exited", reason="grammar_process_failed", retry_after_s=1.0)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def aclose(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _write(process: Process, message: dict[str, Any]) -> None:
    # What is written to a process that has exited is dropped; reading its answer fails.
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(json.dumps(message).encode() + b"\n")
