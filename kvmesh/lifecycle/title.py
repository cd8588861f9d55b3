"""Sets the command line that `ps` and /proc/PID/cmdline show for a forked process, instead of its parent's."""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

# Positions of arg_start and arg_end in /proc/PID/stat after the name in brackets (proc_pid_stat(5), fields 48 and 49).
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46


def set_title(words: Sequence[str], *, needed: int = 1) -> bool:
    """Overwrites this process's command line with as many whole words as fit.

    Returns False and changes nothing if the first `needed` words do not fit, or if the platform does not support this. Words are never
    cut, so that searches in the process list do not match a part of a word.
    """
    if not sys.platform.startswith("linux"):
        return False
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
    title = fitting_words(words, end - start)
    if not start or title.count(b"\0") < needed:
        return False
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
    return True


def fitting_words(words: Sequence[str], room: int) -> bytes:
    """Returns the first words that fit into `room` bytes, each with a terminating zero."""
    title = b""
    for word in words:
        longer = title + word.encode() + b"\0"
        if len(longer) > room:
            break
        title = longer
    return title
