"""One HTTP request while it is served: its body, the headers of its response, and its outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import web

from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.http.json_size import JsonLimits
from services.frontend.api.http.large_bodies import LargeBodies
from services.frontend.api.http.request_bytes import BODY_TOO_LARGE, MEDIA_TYPE, check_json_head, read_bytes
from services.frontend.api.http.stream import EventPace
from services.frontend.api.request_body import parse_object
from services.frontend.api.run import WARNING_HEADER, RequestContext
from services.frontend.api.unknown_fields import read_tolerantly, unused_hints
from services.frontend.settings import HttpSettings

_STATUS = {BODY_TOO_LARGE: 413, MEDIA_TYPE: 415}
"""Reasons with a status of their own."""
ParsedBody = TypeVar("ParsedBody")


@dataclass(slots=True, kw_only=True)
class Exchange(RequestContext):
    """`headers` go into the response. `code` and `reason` are for the log and the metrics."""

    request: web.Request
    settings: HttpSettings
    pace: EventPace
    large_bodies: LargeBodies
    client_id: str
    headers: dict[str, str]
    code: int = 200
    reason: str = "ok"

    @property
    def owner(self) -> str:
        """The tenant that owns what this request stores; empty if no keys are required."""
        return self.caller.tenant

    async def read_object(self, *, adds_model: bool = True) -> dict[str, Any]:
        """Reads the body as a JSON object. `adds_model`: fills in an absent `model` if only one is served.

        Raises InvalidRequestError if the body is too large, late, unreadable or not a JSON object.
        """
        body = await self._read_bytes()
        async with self.large_bodies.turn(self.caller.tenant, len(body)):
            return self._parse(body, adds_model=adds_model)

    async def read_request(self, read: Callable[[dict[str, Any]], ParsedBody]) -> ParsedBody:
        """Reads the body with `read`. Ignores unknown fields with a warning, unless the settings refuse them, and unused hints."""
        data = await self._read_bytes()
        async with self.large_bodies.turn(self.caller.tenant, len(data)):
            values = self._parse(data, adds_model=True)
            refuses = self.settings.refuses_unknown_fields
            body, ignored = (read(values), []) if refuses else read_tolerantly(read, values)
        if ignored := [*ignored, *unused_hints(values)]:
            self.warn(f"ignored: {' '.join(ignored)}")
        return body

    def warn(self, *warnings: str) -> None:
        """Adds warnings to the header of the response."""
        if warnings:
            earlier = self.headers.get(WARNING_HEADER)
            self.headers[WARNING_HEADER] = ", ".join([earlier, *warnings] if earlier else warnings)

    async def _read_bytes(self) -> bytes:
        check_json_head(self.request)
        settings = self.settings
        limits = JsonLimits(containers_max=settings.body_containers_max, values_max=settings.body_values_max)
        body = await read_bytes(self.request, settings, self.caller, limits, self.large_bodies.decompressing)
        self.body_bytes = len(body)
        await self.pipeline.starts.wait(self.caller.tenant)
        return body

    def _parse(self, body: bytes, *, adds_model: bool) -> dict[str, Any]:
        values = parse_object(body)
        if adds_model and values.get("model") is None and self.settings.model_is_optional:
            served = self.pipeline.models.served()
            if len(served) == 1:
                values["model"] = served[0].name
        return values

    def json_response(self, body: Any) -> web.Response:
        """Returns a response of `body` with the headers of this exchange."""
        return json_response(body, headers=self.headers)


def status_of(error: MeshError) -> int:
    """Returns the HTTP status of an error."""
    return _STATUS.get(error.reason) or http_status(error)[0]


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a response of `body` as compact JSON."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
