"""The format of logs: one line per event of `kvmesh.event_log`, and per record of other libraries."""

import json
import logging
import sys
import time
import traceback
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from typing import Any, TextIO

import orjson
from opentelemetry import trace

_VALUE_CHARACTERS_MAX = 8_192


class LogFormat(StrEnum):
    """The format of lines."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    """Severity."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logging(
    *, level: LogLevel = LogLevel.INFO, style: LogFormat = LogFormat.AUTO, service: str, stream: TextIO | None = None
) -> None:
    """Sends all logs of the process to `stream` (default: stderr). Replaces earlier handlers."""
    stream = stream or sys.stderr
    is_text = style is LogFormat.TEXT or (style is LogFormat.AUTO and stream.isatty())
    handler = _Handler(stream)
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter(service))
    _skip_unused_fields()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Handler(logging.StreamHandler[TextIO]):
    """Logs one line about a record that cannot be formatted, where the library would print a traceback that is no log line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # The library's name.
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # The terminal or pipe is closed.
            return
        data = {
            "failed_logger": record.name,
            "failed_event": str(record.msg),
            "error": f"{type(error).__name__}: {error}",
        }
        line = logging.makeLogRecord({"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR"})
        line.msg, line.data = "log_record_failed", data
        with suppress(Exception):  # A log that cannot be written must not end the caller's work.
            self.stream.write(self.format(line) + self.terminator)
            self.flush()


def _skip_unused_fields() -> None:
    """Stops the library from collecting the caller's line and thread, by the switches in its documentation."""
    logging._srcfile = None
    # The process's id and name are collected: vLLM's format has them.
    logging.logThreads = False


class JsonFormatter(logging.Formatter):
    """One JSON object per line. The keys of this class override an event's data of the same name."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _wall(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
            **_trace_keys(),
        }
        line |= {key: value for key, value in _data(record).items() if key not in line}
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:  # Numbers beyond 64 bits, keys that are no strings, lone surrogates.
            return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """For a terminal: time, level, event, key=value."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        pairs = "".join(f" {key}={_one_line(value)}" for key, value in (_data(record) | _trace_keys()).items())
        return f"{clock} {record.levelname:<7} {_one_line(record.getMessage())}{pairs}"


def _data(record: logging.LogRecord) -> dict[str, Any]:
    data = {key: _cut(value) for key, value in getattr(record, "data", {}).items()}
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        data["error"] = _cut(f"{type(error).__name__}: {error}")
        data["traceback"] = _cut("".join(traceback.format_exception(error)), keep_end=True)
    return data


def _trace_keys() -> dict[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _cut(value: Any, *, keep_end: bool = False) -> Any:
    if not isinstance(value, str) or len(value) <= _VALUE_CHARACTERS_MAX:
        return value
    return "..." + value[-_VALUE_CHARACTERS_MAX:] if keep_end else value[:_VALUE_CHARACTERS_MAX] + "..."


def _one_line(value: Any) -> str:
    text = str(value)
    if text.isprintable() and " " not in text:
        return text
    # json.dumps escapes every character that could break the line or move the cursor.
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _wall(created: float) -> str:
    return f"{_second(int(created))}.{int(created * 1000) % 1000:03d}Z"


@lru_cache(maxsize=2)
def _second(wall_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall_s))
