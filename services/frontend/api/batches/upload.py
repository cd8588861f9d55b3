"""Reads a file from a multipart form and writes it to disk as it arrives."""

import asyncio
from dataclasses import dataclass

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from kvmesh.checks import is_whole_number
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.rpc.http_status import BODY_TOO_LARGE
from services.frontend.api.http.request_bytes import send_continue
from services.frontend.api.request_body import invalid_value
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import INPUT_PURPOSE
from services.frontend.stores.contents import NewFile

UPLOAD_TIMEOUT_S = 3600.0
"""Longest duration of an upload: 200 MiB at 0.5 Mbit/s. Parts that stop arriving end it sooner."""
_WRITE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_FIELD_BYTES_MAX = 1024
_PARTS_MAX = 16
_LINES_BEFORE_MAX = 4
_NAME_CHARACTERS_MAX = 255


@dataclass(slots=True, kw_only=True)
class Form:
    """The fields of the form."""

    purpose: str = ""
    name: str = ""
    anchor: str = ""
    ttl_text: str = ""
    has_file: bool = False


class FormReader(MultipartReader):
    """Finds the first part within a few lines.

    aiohttp reads what precedes it line by line, without a limit and without a pause: 2 MB of empty lines took 8 s of the event loop.
    """

    async def _read_until_first_boundary(self) -> None:
        for _ in range(_LINES_BEFORE_MAX):
            line = (await self._readline()).rstrip()
            self._at_eof = line == self._boundary + b"--"
            if self._at_eof or line == self._boundary:
                return
        raise ValueError("the form does not begin with its boundary")


_FIELDS = {"purpose": "purpose", "expires_after[anchor]": "anchor", "expires_after[seconds]": "ttl_text"}


async def read_upload(
    request: web.Request, file: NewFile, settings: BatchSettings, *, idle_timeout_s: float
) -> tuple[Form, float | None]:
    """Writes the form's file to `file`; returns the form and the lifetime of the file. InvalidRequestError names the field."""
    form = Form()
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            await send_continue(request)
            await _read_parts(
                FormReader(request.headers, request.content),
                form,
                file,
                settings=settings,
                idle_timeout_s=idle_timeout_s,
            )
    except TimeoutError:
        raise InvalidRequestError("the upload did not arrive in time", reason="body_timeout") from None
    except (web.RequestPayloadError, HttpProcessingError, ValueError, AssertionError, LookupError) as error:
        # aiohttp's reader raises these for a malformed form.
        raise InvalidRequestError("the form cannot be read", reason="invalid_body") from error
    return form, _checked(form, settings)


async def _read_parts(
    reader: MultipartReader, form: Form, file: NewFile, *, settings: BatchSettings, idle_timeout_s: float
) -> None:
    for _ in range(_PARTS_MAX):
        async with asyncio.timeout(idle_timeout_s):
            part = await reader.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise InvalidRequestError("nested forms are not supported", reason="invalid_body")
        if part.name == "file":
            if form.has_file:
                raise InvalidRequestError("the form may have only one file", field="file", reason="invalid_value")
            form.has_file, form.name = True, (part.filename or "upload.jsonl")[:_NAME_CHARACTERS_MAX]
            await _write(part, file, settings, idle_timeout_s=idle_timeout_s)
        elif part.name in _FIELDS:
            async with asyncio.timeout(idle_timeout_s):
                data = await part.read_chunk(_FIELD_BYTES_MAX)
            setattr(form, _FIELDS[part.name], data.decode("utf-8").strip())
        else:
            name = str(part.name)[:64]
            raise InvalidRequestError(f"unknown field: {name}", field=name, reason="unknown_field")
    raise InvalidRequestError(f"a form may have at most {_PARTS_MAX} fields", reason="invalid_body")


async def _write(part: BodyPartReader, file: NewFile, settings: BatchSettings, *, idle_timeout_s: float) -> None:
    data = bytearray()
    size_bytes = 0
    while True:
        async with asyncio.timeout(idle_timeout_s):
            chunk = await part.read_chunk(_READ_BYTES)
        size_bytes += len(chunk)
        if size_bytes > settings.file_bytes_max:
            raise InvalidRequestError(
                f"the file is larger than {settings.file_bytes_max} bytes", field="file", reason=BODY_TOO_LARGE
            )
        data += chunk
        if len(data) >= _WRITE_BYTES or not chunk:
            await asyncio.to_thread(file.write, bytes(data))
            data.clear()
        if not chunk:
            return


def _checked(form: Form, settings: BatchSettings) -> float | None:
    if not form.purpose:
        raise invalid_value("purpose", wanted=INPUT_PURPOSE)
    if form.purpose != INPUT_PURPOSE:
        raise UnsupportedError(f"purpose must be batch, not {form.purpose[:32]!r}", field="purpose")
    if not form.has_file:
        raise invalid_value("file", wanted="a file")
    if not form.anchor and not form.ttl_text:
        return None
    if form.anchor != "created_at":
        raise invalid_value("expires_after.anchor", wanted="created_at")
    text = form.ttl_text
    if not (is_whole_number(text) and len(text) < 12):
        raise invalid_value("expires_after.seconds", wanted="an integer")
    return check_ttl(int(text), settings, "expires_after.seconds")


def check_ttl(ttl_s: int, settings: BatchSettings, field: str) -> float:
    """Returns the lifetime of a file if it is between OpenAI's minimum and the setting's maximum."""
    if not 3600 <= ttl_s <= settings.file_ttl_s:
        raise invalid_value(field, wanted=f"an integer from 3600 to {settings.file_ttl_s:g}")
    return float(ttl_s)
