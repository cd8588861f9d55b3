"""The lines of a batch's input file: validated before anything runs, then read in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, BinaryIO, Literal

import orjson
from msgspec import Meta

from kvmesh.errors import InvalidRequestError
from services.frontend.api.request_body import Body, JsonObject, read_body

PROBLEMS_MAX = 100
"""Listed problems, after which validation stops."""
CUSTOM_ID_CHARACTERS_MAX = 512
CHUNK_BYTES = 1 << 20
"""Bytes of lines after which one read ends."""
CustomId = Annotated[str, Meta(min_length=1, max_length=CUSTOM_ID_CHARACTERS_MAX)]
_CODES = {
    "custom_id": "invalid_custom_id",
    "method": "invalid_method",
    "url": "mismatched_endpoint",
    "body": "invalid_body",
}


class RequestLine(Body, kw_only=True):
    """A line as the client wrote it."""

    custom_id: CustomId
    method: Literal["POST"]
    url: str
    body: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request. `number` counts the file's lines from 1, empty ones included."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Result of validating a file. `model`: the model of all lines; None if they differ."""

    total: int
    model: str | None
    problems: list[dict[str, Any]]


class LineProblem(Exception):
    """A line is not a request; the arguments are code, message and field."""


def validate_file(path: Path, endpoint: str, *, lines_max: int, line_bytes_max: int) -> Validation:
    """Reads the whole file; blocks. Every line must be a request of the endpoint with an id of its own."""
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    models: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, data in numbered_lines(file, line_bytes_max):
            total += 1
            try:
                line = read_line(number, data, endpoint, line_bytes_max=line_bytes_max)
                if line.custom_id in seen:
                    raise LineProblem("duplicate_custom_id", "custom_id must differ from line to line", "custom_id")
                seen.add(line.custom_id)
                models.add(str(line.body.get("model")))
            except LineProblem as problem:
                code, message, field = problem.args
                problems.append({"code": code, "line": number, "message": message, "param": field})
            if total > lines_max:
                problems.append(_file_problem("too_many_lines", message=f"a batch has at most {lines_max} requests"))
            if len(problems) >= PROBLEMS_MAX or total > lines_max:
                break
    if not total:
        problems.append(_file_problem("empty_file", message="the file has no request"))
    return Validation(total=total, model=models.pop() if len(models) == 1 else None, problems=problems)


def _file_problem(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": "input_file_id"}


def numbered_lines(file: BinaryIO, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty. Cuts a line that is too long to one byte more than the limit."""
    number = 0
    while data := file.readline(line_bytes_max + 1):
        number += 1
        is_complete = data.endswith(b"\n")
        while not is_complete and len(data) > line_bytes_max:
            rest = file.readline(1 << 20)
            is_complete = not rest or rest.endswith(b"\n")
        if data.strip():
            yield number, data


def read_line(number: int, data: bytes, endpoint: str, *, line_bytes_max: int) -> BatchLine:
    """Parses and checks a line. Raises LineProblem."""
    if len(data.rstrip(b"\r\n")) > line_bytes_max:
        raise LineProblem("line_too_long", f"a line has at most {line_bytes_max} bytes", None)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LineProblem("invalid_json_line", f"the line is not valid JSON: {error}"[:300], None) from None
    if not isinstance(value, dict):
        raise LineProblem("invalid_json_line", "the line must be a JSON object", None)
    try:
        line = read_body(RequestLine, value)
    except InvalidRequestError as error:
        raise LineProblem(_CODES.get(error.field, "unknown_field"), error.message, error.field) from None
    if line.url != endpoint:
        raise LineProblem("mismatched_endpoint", f"url must be the batch's endpoint {endpoint}", "url")
    return BatchLine(number=number, custom_id=line.custom_id, body=line.body)


class LineReader:
    """Reads the lines of a valid file in chunks; blocks. `close` may be called while a cancelled `read` still runs in a thread."""

    def __init__(self, path: Path, endpoint: str, *, line_bytes_max: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._line_bytes_max = line_bytes_max
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._lines: Iterator[tuple[int, bytes]] = iter(())
        self._is_closed = False

    def read(self, skipped: set[int], count: int) -> list[BatchLine]:
        """Returns the next lines that are not in `skipped`; none at the end of the file and after `close`."""
        found: list[BatchLine] = []
        with self._lock:
            if self._is_closed:
                return found
            if self._file is None:
                self._file = self._path.open("rb")
                self._lines = numbered_lines(self._file, self._line_bytes_max)
            size_bytes = 0
            for number, data in self._lines:
                if number in skipped:
                    continue
                found.append(read_line(number, data, self._endpoint, line_bytes_max=self._line_bytes_max))
                size_bytes += len(data)
                if len(found) >= count or size_bytes >= CHUNK_BYTES:
                    break
        return found

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
