"""Runs simulations in a separate process: they take seconds of CPU time, and need the router's code."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence

import msgspec

from kvmesh.core.whatif import SimulationOutcome, SimulationRequest
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, OverloadedError

COMMAND = ("-m", "services.whatif", "--request")
TIMEOUT_S_MAX = 600.0


class SimulationRunner:
    """One simulation at a time."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._is_running = False

    async def run(self, request: SimulationRequest, *, timeout_s: float | None) -> SimulationOutcome:
        """Raises OverloadedError while another one runs, and DeadlineError after `timeout_s`. Cancelling ends the process."""
        if self._is_running:
            raise OverloadedError("another simulation is running", reason="simulation_running", retry_after_s=5.0)
        self._is_running = True
        try:
            limit_s = TIMEOUT_S_MAX if timeout_s is None else min(timeout_s, TIMEOUT_S_MAX)
            output = await self._answer(msgspec.json.encode(request), limit_s)
        finally:
            self._is_running = False
        return _outcome(output)

    async def _answer(self, request: bytes, timeout_s: float) -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate(request)
        except TimeoutError:
            raise DeadlineError(f"the simulation did not end within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
        return output


def _outcome(output: bytes) -> SimulationOutcome:
    try:
        found = msgspec.json.decode(output)
        if "error" in found:
            raise InvalidRequestError(str(found["error"]), field=str(found["field"]))
        return msgspec.convert(found, type=SimulationOutcome)
    except (msgspec.MsgspecError, TypeError, KeyError):
        raise InternalError("the simulation ended without a result; the planner's log shows why") from None
