"""The lines of an input file: read in order, checked before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import orjson

PROBLEMS_MAX = 100
"""Problems that are listed; the rest of the file is not looked at."""
CUSTOM_ID_CHARACTERS_MAX = 512
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request. `number` counts the file's lines from 1, empty ones included."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a file holds. `model` is the one that all lines name, None where they differ."""

    total: int
    model: str | None
    problems: list[dict[str, Any]]


class LineProblem(Exception):
    """A line is not a request; the arguments are code, message and field."""


def check_file(path: Path, endpoint: str, *, lines_max: int, line_bytes_max: int) -> Checked:
    """Reads the whole file; blocks. Every line must be a request of the endpoint with an id of its own."""
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    models: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, data in numbered_lines(file, line_bytes_max):
            total += 1
            try:
                line = read_line(number, data, endpoint, line_bytes_max)
                if line.custom_id in seen:
                    raise LineProblem("duplicate_custom_id", "custom_id must differ from line to line", "custom_id")
                seen.add(line.custom_id)
                models.add(str(line.body.get("model")))
            except LineProblem as problem:
                code, message, field = problem.args
                problems.append({"code": code, "line": number, "message": message, "param": field})
            if total > lines_max:
                problems.append(_problem("too_many_lines", f"a batch has at most {lines_max} requests"))
            if len(problems) >= PROBLEMS_MAX or total > lines_max:
                break
    if not total:
        problems.append(_problem("empty_file", "the file has no request"))
    return Checked(total=total, model=next(iter(models)) if len(models) == 1 else None, problems=problems)


def _problem(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": "input_file_id"}


def numbered_lines(file: BinaryIO, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, by number. One that is too long comes cut, one byte longer than is allowed."""
    number = 0
    while data := file.readline(line_bytes_max + 1):
        number += 1
        whole = data.endswith(b"\n")
        while not whole and len(data) > line_bytes_max:
            rest = file.readline(1 << 20)
            whole = not rest or rest.endswith(b"\n")
        if data.strip():
            yield number, data


def read_line(number: int, data: bytes, endpoint: str, line_bytes_max: int) -> Line:
    """LineProblem says what is wrong with it."""
    if len(data.rstrip(b"\r\n")) > line_bytes_max:
        raise LineProblem("line_too_long", f"a line has at most {line_bytes_max} bytes", None)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LineProblem("invalid_json_line", f"the line is not valid JSON: {error}"[:300], None) from None
    if not isinstance(value, dict):
        raise LineProblem("invalid_json_line", "the line must be a JSON object", None)
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        message = f"custom_id must be a string of 1 to {CUSTOM_ID_CHARACTERS_MAX} characters"
        raise LineProblem("invalid_custom_id", message, "custom_id")
    if value.get("method") != "POST":
        raise LineProblem("invalid_method", "method must be POST", "method")
    if value.get("url") != endpoint:
        raise LineProblem("mismatched_endpoint", f"url must be the batch's endpoint {endpoint}", "url")
    if not isinstance(body, dict):
        raise LineProblem("invalid_body", "body must be a JSON object", "body")
    if unknown := sorted(value.keys() - _FIELDS):
        raise LineProblem("unknown_field", f"unknown field: {unknown[0][:64]}", unknown[0][:64])
    return Line(number=number, custom_id=custom_id, body=body)


class LineReader:
    """Hands out the lines of a checked file in chunks; blocks. `close` may come while a cancelled `read` goes on unheard."""

    def __init__(self, path: Path, endpoint: str, *, line_bytes_max: int, chunk_bytes: int = 1 << 20) -> None:
        self._path = path
        self._endpoint = endpoint
        self._line_bytes_max = line_bytes_max
        self._chunk_bytes = chunk_bytes
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._lines: Iterator[tuple[int, bytes]] = iter(())
        self._is_closed = False

    def read(self, skipped: set[int], count: int) -> list[Line]:
        """The next lines that are not to be skipped; empty at the end and after `close`."""
        with self._lock:
            if self._file is None and not self._is_closed:
                self._file = self._path.open("rb")
                self._lines = numbered_lines(self._file, self._line_bytes_max)
            return [] if self._is_closed else self._read(skipped, count)

    def _read(self, skipped: set[int], count: int) -> list[Line]:
        found: list[Line] = []
        size_bytes = 0
        for number, data in self._lines:
            if number in skipped:
                continue
            found.append(read_line(number, data, self._endpoint, self._line_bytes_max))
            size_bytes += len(data)
            if len(found) >= count or size_bytes >= self._chunk_bytes:
                break
        return found

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
