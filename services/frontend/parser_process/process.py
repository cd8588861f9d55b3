"""The process that runs vLLM's parsers. Messages are lines of JSON (see `kvmesh.engines.vllm.parsers`)."""

import asyncio
import importlib.util
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvmesh.errors import LostError, MeshError, OverloadedError, UnavailableError, UnsupportedError
from kvmesh.event_log import event_logger

if TYPE_CHECKING:
    from services.frontend.parser_process.relay import RemoteAnswer

_log = event_logger(__name__)
START_TIMEOUT_S = 120.0
"""Longest wait for the process: it imports torch, which takes long on a busy machine."""
REPLY_TIMEOUT_S = 30.0
"""Longest wait for the last reply after the end of an answer. A reply takes milliseconds, unless the process hangs."""
RESTART_PAUSE_S, RESTART_PAUSE_MAX_S = 1.0, 60.0
"""Pause before a process that has exited is restarted. It doubles after each failure."""
REPLY_BYTES_MAX = 16 << 20
"""Longest reply. One text of an answer is some kilobytes; a longer reply is a defect of the process."""
MODULE = "kvmesh.engines.vllm.parsers"
OnReply = Callable[[Sequence[Sequence[Any]]], None]
OnFailure = Callable[[MeshError], None]


def check_installed() -> None:
    """Raises UnsupportedError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "vLLM's parsers need vllm, which is not installed here", field="tool_parser", reason="vllm_missing"
        )


class ParserProcess:
    """One process, for one model whose parser is named `vllm:NAME`. Replies come in the order of messages.

    1. Each open session receives a reply to each of its messages, or one failure.
    2. When the process exits all sessions fail, and new ones are refused until it has restarted.
    """

    def __init__(self, directory: Path, *, tool: str, reasoning: str, answers_max: int) -> None:
        self._directory = directory
        self.tool = tool
        self.reasoning = reasoning
        self._answers_max = answers_max
        self._process: Process | None = None
        self._following: asyncio.Task[None] | None = None
        self.is_running = False
        self._sessions: dict[str, tuple[OnReply, OnFailure]] = {}
        self._number = 0
        self.answers: WeakValueDictionary[str, RemoteAnswer] = WeakValueDictionary()
        """Answers that this process parses, by request id; an entry lives as long as its request."""

    async def start(self) -> None:
        """Starts the process. Raises UnsupportedError for unknown parser names, UnavailableError if it does not start."""
        check_installed()
        try:
            await self._spawn()
        except BaseException:
            await self._end()
            raise
        self._following = asyncio.create_task(self._follow(), name="parser-process")
        _log.info("parser_process_started", tool=self.tool, reasoning=self.reasoning)

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, str(self._directory),
            stdin=PIPE, stdout=PIPE, limit=REPLY_BYTES_MAX,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                names = await self._read()
        except (TimeoutError, LostError) as error:
            raise UnavailableError("vLLM's parsers did not start", reason="parser_process_failed") from error
        _check_names(names, tool=self.tool, reasoning=self.reasoning)
        self.is_running = True

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            # `readline` raises it for a line above the limit of the stream.
            raise LostError("a reply of the parser process is too long", reason="parser_process_failed") from error
        if not line:
            raise LostError("the parser process has exited", reason="parser_process_failed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _follow(self) -> None:
        """Dispatches replies. When the process exits, fails its sessions and restarts it."""
        while True:
            try:
                while True:
                    self._on_reply(await self._read())
            except LostError as error:
                self.is_running = False
                _log.error("parser_process_lost", detail=error.message)
                # Replaced before the callbacks, because requests close their sessions.
                sessions, self._sessions = self._sessions, {}
                for _, on_failure in sessions.values():
                    on_failure(error)
            await self._restart()

    async def _restart(self) -> None:
        pause_s = RESTART_PAUSE_S
        while not self.is_running:
            await self._end()
            await asyncio.sleep(pause_s)
            pause_s = min(RESTART_PAUSE_MAX_S, 2 * pause_s)
            try:
                await self._spawn()
            except MeshError as error:
                _log.warning("parser_process_not_restarted", detail=error.message)
        _log.info("parser_process_restarted", tool=self.tool, reasoning=self.reasoning)

    def _on_reply(self, answer: Mapping[str, Any]) -> None:
        session = self._sessions.get(answer.get("session", ""))
        # A reply to a session that was closed in the meantime.
        if session is None:
            return
        on_reply, on_failure = session
        if "error" in answer:
            _log.warning("parser_failed", detail=answer["error"])
            del self._sessions[answer["session"]]
            on_failure(LostError("vLLM's parser failed on the answer", reason="parser_failed"))
        elif "parts" in answer:
            on_reply(answer["parts"])

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def open_nowait(
        self, *, tools: Sequence[Mapping[str, Any]], parses_tools: bool, prompt_ids: Sequence[int],
        on_reply: OnReply, on_failure: OnFailure,
    ) -> str:  # fmt: skip
        """Opens a session for one answer. Raises UnavailableError without a process, OverloadedError above `answers_max`."""
        if not self.is_running:
            raise UnavailableError("the parser process has exited", reason="parser_process_failed", retry_after_s=1.0)
        if len(self._sessions) >= self._answers_max:
            raise OverloadedError("too many answers are being parsed", reason="parsers_full", retry_after_s=1.0)
        self._number += 1
        session = str(self._number)
        self._sessions[session] = (on_reply, on_failure)
        self._write(
            op="open",
            session=session,
            tool=self.tool if parses_tools else "",
            reasoning=self.reasoning,
            tools=list(tools) if parses_tools else [],
            prompt_ids=list(prompt_ids),
        )
        return session

    def push_nowait(self, session: str, text: str, ids: Sequence[int], *, is_last: bool) -> None:
        """Sends text. The caller waits for the reply before it sends more, which bounds the data in flight."""
        self._write(op="push", session=session, text=text, ids=list(ids), is_last=is_last)

    def close_nowait(self, session: str) -> None:
        """Closes a session. Idempotent."""
        if self._sessions.pop(session, None) is not None and self.is_running:
            self._write(op="close", session=session)

    def _write(self, **message: Any) -> None:
        # A process that has exited has failed its sessions; their messages are dropped.
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(message).encode() + b"\n")

    async def aclose(self) -> None:
        """Ends the process. Idempotent."""
        self.is_running = False
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _check_names(names: Mapping[str, Any], tool: str, reasoning: str) -> None:
    for field, name, known in (
        ("tool_parser", tool, names["tools"]),
        ("reasoning_parser", reasoning, names["reasonings"]),
    ):
        if name and name not in known:
            raise UnsupportedError(
                f"vLLM has no parser {name[:64]!r}; it has {', '.join(known)}", field=field, reason="parser_unknown"
            )
