"""Finds the line of a log that explains why a process ended."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LINES = 200
BYTES_MAX = 256 << 10
CHARACTERS_MAX = 300
_EXCEPTION = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:ERROR [^\]]*\]\s*)?([\w.]*(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?)$"
)
"""Matches the last line of a traceback, also after the prefixes of vLLM's log."""
_VAGUE = re.compile(
    r"Engine core initialization failed|See (?:root cause|stack trace) above|--help` lists all settings"
)
"""Messages that only refer to an earlier one."""


def log_tail(path: Path) -> Sequence[str]:
    """Returns the last lines of a file; none if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - BYTES_MAX))
        return file.read().decode(errors="replace").splitlines()[-LINES:]
    return ()


def failure_line(lines: Sequence[str]) -> str:
    """Returns the line that names the failure: the last line for people, else the newest exception or event at level error."""
    found = [text for line in lines if (text := _text(line)) and not _VAGUE.search(text[0])]
    if not found:
        return ""
    last = found[-1][0]
    failures = [text for text, is_failure in found if is_failure]
    has_last_words = not lines[-1].startswith("{") and "Warning" not in last
    return (last if has_last_words or not failures else failures[-1])[:CHARACTERS_MAX]


def _text(line: str) -> tuple[str, bool] | None:
    """A line for people, and whether it names a failure. None: a frame of a traceback, or nothing."""
    if line.startswith("{"):
        with suppress(ValueError, AttributeError):
            event = json.loads(line)
            cause = event.get("error") or event.get("message") or ""
            text = f"{event.get('event', '')}: {cause}" if cause else str(event.get("event", ""))
            return text, event.get("level") in ("error", "critical")
    if found := _EXCEPTION.match(line.strip()):
        return found[1], True
    if not line.strip() or line.startswith((" ", "Traceback ")):
        return None
    return line.strip(), False
