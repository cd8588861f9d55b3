"""The engine thread: runs commands between steps, steps while there is work, and waits otherwise."""

import queue
import threading
from collections.abc import Callable

Command = Callable[[], None]
FIRST_PAUSE_S = 0.0003
PULL_PAUSE_S = 0.001
"""Only a step notices the end of a transfer. While a prompt's blocks arrive, a pause delays its first token."""


class IdlePauses:
    """Pauses between steps that did nothing. They double from FIRST_PAUSE_S to the longest."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._pause_s = FIRST_PAUSE_S

    def after_step(self, *, is_active: bool, is_pulling: bool) -> float:
        """Returns the pause before the next step. `is_active`: the last step did something, or the next one will."""
        if is_active:
            self._pause_s = FIRST_PAUSE_S
            return 0.0
        longest_s = min(PULL_PAUSE_S, self._longest_s) if is_pulling else self._longest_s
        self._pause_s = min(2 * self._pause_s, longest_s)
        return self._pause_s


class EngineThread:
    """Runs `build`, then `iterate` repeatedly. `iterate` returns how long to wait for a command before the next call; None: until one
    arrives. An exception ends the thread and is passed to `died`. `ended` is always called last.
    """

    def __init__(
        self,
        *,
        build: Callable[[], None],
        iterate: Callable[[], float | None],
        died: Callable[[BaseException], None],
        ended: Callable[[], None],
    ) -> None:
        self._build = build
        self._iterate = iterate
        self._died = died
        self._ended = ended
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Command) -> None:
        """Runs a command between steps. Safe on any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread after the present step and all earlier commands. Safe on any thread."""
        self._commands.put(self._set_stopping)

    def join(self, timeout_s: float) -> bool:
        """Returns True when the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            self._build()
            wait_s: float | None = 0.0
            while not self._is_stopping:
                self._take_commands(wait_s)
                wait_s = self._iterate()
        except BaseException as error:  # noqa: BLE001  # The boundary of the thread.
            self._died(error)
        finally:
            self._ended()

    def _take_commands(self, wait_s: float | None) -> None:
        try:
            if wait_s is None or wait_s > 0:
                self._commands.get(timeout=wait_s)()
            while not self._is_stopping:
                self._commands.get_nowait()()
        except queue.Empty:
            return
