"""What `ps` and /proc/PID/cmdline show of a process that was forked, not started: its own command line, not its parent's."""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

# Places of arg_start and arg_end in /proc/PID/stat, counted behind the name in brackets (proc_pid_stat(5), 48 and 49).
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46


def set_title(words: Sequence[str], *, needed: int = 1) -> bool:
    """Writes over the words that this process was started with. False, and nothing is written, where the first `needed` have no
    room or a process cannot do that.

    Whole words only, so that searches in the process list do not match half a word.
    """
    if not sys.platform.startswith("linux"):
        return False
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
    title = fitting(words, end - start)
    if not start or title.count(b"\0") < needed:
        return False
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
    return True


def fitting(words: Sequence[str], room: int) -> bytes:
    """As many of the words as fit into so many bytes, each with the zero behind it."""
    title = b""
    for word in words:
        longer = title + word.encode() + b"\0"
        if len(longer) > room:
            break
        title = longer
    return title
