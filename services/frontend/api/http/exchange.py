"""One HTTP request while it is served: its body, the headers of its response, and its outcome."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import web

from services.frontend.api.http.large_bodies import LARGE_BYTES, LargeBodies
from services.frontend.api.http.request_bytes import read_bytes
from services.frontend.api.http.stream import EventPace
from services.frontend.api.request_body import parse_object
from services.frontend.api.run import WARNING_HEADER, RequestContext
from services.frontend.api.unknown_fields import UNUSED_HINTS, read_tolerantly
from services.frontend.settings import HttpSettings

ParsedBody = TypeVar("ParsedBody")


@dataclass(slots=True, kw_only=True)
class Exchange(RequestContext):
    """`headers` go into the response. `code` and `reason` are for the log and the metrics."""

    request: web.Request
    settings: HttpSettings
    pace: EventPace
    large_bodies: LargeBodies
    headers: dict[str, str]
    code: int = 200
    reason: str = "ok"
    body_bytes: int = 0

    @property
    def owner(self) -> str:
        """The tenant that owns what this request stores; empty if no keys are required."""
        return self.caller.tenant

    async def read_request(
        self, read: Callable[[dict[str, Any]], ParsedBody], *, is_strict: bool = False
    ) -> ParsedBody:
        """Reads the body, a JSON object, with `read`. Raises InvalidRequestError if it is too large, late, unreadable or something else.

        Unless `is_strict`, an absent `model` becomes the only one that is served, and unused hints are ignored with a warning; so are
        unknown fields, unless the settings refuse them.
        """
        tenant, large_bodies = self.caller.tenant, self.large_bodies
        with large_bodies.arriving(tenant) as grow:
            data = await read_bytes(
                self.request, self.settings, self.caller, decompressing=large_bodies.decompressing, grow=grow
            )
            self.body_bytes = len(data)
            # Inside the block: the body counts as arriving until the request may start.
            await self.pipeline.starts.wait(tenant)
        async with large_bodies.turn(tenant, len(data)) if len(data) > LARGE_BYTES else nullcontext():
            values = parse_object(data)
            if is_strict:
                return read(values)
            if values.get("model") is None and self.settings.model_is_optional:
                served = self.pipeline.models.served()
                if len(served) == 1:
                    values["model"] = served[0].name
            refuses = self.settings.refuses_unknown_fields
            body, ignored = (read(values), []) if refuses else read_tolerantly(read, values)
        if ignored := [*ignored, *(name for name in UNUSED_HINTS if values.get(name) is not None)]:
            self.warn(f"ignored: {' '.join(ignored)}")
        return body

    def warn(self, *warnings: str) -> None:
        """Adds warnings to the header of the response."""
        if warnings:
            earlier = self.headers.get(WARNING_HEADER)
            self.headers[WARNING_HEADER] = ", ".join([earlier, *warnings] if earlier else warnings)

    def json_response(self, body: Any) -> web.Response:
        """Returns a response of `body` with the headers of this exchange."""
        return json_response(body, headers=self.headers)


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a response of `body` as compact JSON."""
    return web.Response(body=_encoded(body), status=status, headers=headers, content_type="application/json")


def _encoded(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        # An error names a part of a head or a form whose bytes are no UTF-8. They come as surrogates.
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
