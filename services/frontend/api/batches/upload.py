"""A file that comes as a multipart form, written to the disk as it comes."""

import asyncio
from dataclasses import dataclass

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.stores.batch_rows import INPUT_PURPOSE
from services.frontend.stores.files import NewFile

FILE_TOO_LARGE = "body_too_large"
_WRITTEN_AT_ONCE = 1 << 20
_READ_AT_ONCE = 1 << 16
_FIELD_BYTES_MAX = 1024
_PARTS_MAX = 16
_NAME_CHARACTERS_MAX = 255


@dataclass(slots=True, kw_only=True)
class Form:
    """What the form said."""

    purpose: str = ""
    name: str = ""
    anchor: str = ""
    ttl_text: str = ""
    has_file: bool = False


_FIELDS = {"purpose": "purpose", "expires_after[anchor]": "anchor", "expires_after[seconds]": "ttl_text"}


async def read_upload(
    request: web.Request, file: NewFile, settings: BatchSettings, *, idle_timeout_s: float
) -> tuple[Form, float | None]:
    """Reads the form into `file`; returns it and how long the file is to live. InvalidRequestError names the field."""
    form = Form()
    try:
        async with asyncio.timeout(settings.upload_timeout_s):
            await _read_parts(await request.multipart(), form, file, settings, idle_timeout_s)
    except TimeoutError:
        raise InvalidRequestError("the upload did not come in time", reason="body_timeout") from None
    except (web.RequestPayloadError, HttpProcessingError, ValueError, AssertionError, LookupError) as error:
        # The framework's reader says in these words that a form is broken.
        raise InvalidRequestError("the form cannot be read", reason="invalid_body") from error
    return form, _checked(form, settings)


async def _read_parts(
    reader: MultipartReader, form: Form, file: NewFile, settings: BatchSettings, idle_timeout_s: float
) -> None:
    for _ in range(_PARTS_MAX):
        async with asyncio.timeout(idle_timeout_s):
            part = await reader.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise InvalidRequestError("forms inside forms are not read", reason="invalid_body")
        if part.name == "file":
            if form.has_file:
                raise InvalidRequestError("one file at a time", field="file", reason="invalid_value")
            form.has_file, form.name = True, (part.filename or "upload.jsonl")[:_NAME_CHARACTERS_MAX]
            await _write(part, file, settings, idle_timeout_s)
        elif part.name in _FIELDS:
            async with asyncio.timeout(idle_timeout_s):
                data = await part.read_chunk(_FIELD_BYTES_MAX)
            setattr(form, _FIELDS[part.name], data.decode("utf-8").strip())
        else:
            name = str(part.name)[:64]
            raise InvalidRequestError(f"unknown field: {name}", field=name, reason="unknown_field")
    raise InvalidRequestError(f"a form has at most {_PARTS_MAX} fields", reason="invalid_body")


async def _write(part: BodyPartReader, file: NewFile, settings: BatchSettings, idle_timeout_s: float) -> None:
    data = bytearray()
    size_bytes = 0
    while True:
        async with asyncio.timeout(idle_timeout_s):
            chunk = await part.read_chunk(_READ_AT_ONCE)
        size_bytes += len(chunk)
        if size_bytes > settings.file_bytes_max:
            raise InvalidRequestError(
                f"the file is larger than {settings.file_bytes_max} bytes", field="file", reason=FILE_TOO_LARGE
            )
        data += chunk
        if len(data) >= _WRITTEN_AT_ONCE or not chunk:
            await asyncio.to_thread(file.write, bytes(data))
            data.clear()
        if not chunk:
            return


def _checked(form: Form, settings: BatchSettings) -> float | None:
    if not form.purpose:
        raise InvalidRequestError("purpose must be batch", field="purpose", reason="invalid_value")
    if form.purpose != INPUT_PURPOSE:
        raise UnsupportedError(f"purpose can only be batch, not {form.purpose[:32]!r}", field="purpose")
    if not form.has_file:
        raise InvalidRequestError("file must be a file", field="file", reason="invalid_value")
    if not form.anchor and not form.ttl_text:
        return None
    if form.anchor != "created_at":
        raise InvalidRequestError(
            "expires_after.anchor must be created_at", field="expires_after.anchor", reason="invalid_value"
        )
    text = form.ttl_text
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidRequestError(
            "expires_after.seconds must be an integer", field="expires_after.seconds", reason="invalid_value"
        )
    return check_ttl(int(text), settings, "expires_after.seconds")


def check_ttl(ttl_s: int, settings: BatchSettings, field: str) -> float:
    """How long a file is to live, within OpenAI's least and the settings' most."""
    if not 3600 <= ttl_s <= settings.file_ttl_s:
        raise InvalidRequestError(
            f"{field} must be an integer from 3600 to {settings.file_ttl_s:g}", field=field, reason="invalid_value"
        )
    return float(ttl_s)
