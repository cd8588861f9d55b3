"""Go's duration texts, which Consul's API takes and gives: `90s`, `1m30s`, `250ms`."""

import re

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_LENGTH_MAX = 64


def to_text(duration_s: float) -> str:
    """Seconds as Consul reads them, to the millisecond."""
    return f"{round(duration_s * 1000)}ms"


def to_seconds(text: str) -> float:
    """The seconds of a duration text. ValueError when it is none; negative durations are none."""
    if text == "0":
        return 0.0
    if not text or len(text) > _LENGTH_MAX:
        raise ValueError(f"not a duration: {text[:_LENGTH_MAX]!r}")
    total_s, position = 0.0, 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            raise ValueError(f"not a duration: {text!r}")
        total_s += float(part[1]) * _UNITS_S[part[2]]
        position = part.end()
    return total_s
