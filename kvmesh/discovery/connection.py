"""HTTP calls to one Consul agent: address, TLS, token, time and size limits, blocking queries. Every failure is a MeshError."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
from yarl import URL

from kvmesh.checks import is_whole_number
from kvmesh.clock import Clock
from kvmesh.discovery import wire
from kvmesh.discovery.retry import Backoff
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError, MeshError, UnavailableError
from kvmesh.identity.secret import read_private
from kvmesh.network.causes import connection_cause
from kvmesh.network.names import host_port

DEFAULT_PORT = 8500
_INDEX_HEADER = "X-Consul-Index"
# Consul lengthens a blocking query by up to a sixteenth of its wait, at random.
_WAIT_JITTER = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsulResponse:
    """A response with status 200. `index` is 0 when the response has none."""

    index: int
    body: bytes


class ConsulConnection:
    """Calls to one agent over persistent connections, on one event loop."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._settings = settings
        self._origin = origin(settings)
        self._tls = tls_context(settings) if self._origin.startswith("https:") else None
        self._token = token_of(settings)
        self._slots = asyncio.Semaphore(settings.calls_max)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: bytes | Mapping[str, Any] = b""
    ) -> ConsulResponse:
        """Makes one call within `call_timeout_s`. `path` must be URL-quoted."""
        try:
            # The timeout includes the wait for a slot.
            async with asyncio.timeout(self._settings.call_timeout_s), self._slots:
                return await self._send(method=method, path=path, params=params or {}, body=body)
        except TimeoutError:
            raise self._unavailable("did not answer in time", reason="registry_timeout") from None

    async def wait(self, path: str, index: int, *, random: Callable[[], float]) -> ConsulResponse:
        """A blocking query: waits for another index than `index`, for about `watch_wait_s`. It does not count towards `calls_max`.

        A random part of the wait, at most a tenth, is subtracted, so that watches that start together spread out.
        """
        wait_s = self._settings.watch_wait_s * (1.0 - 0.1 * random())
        params = {"index": str(index), "wait": wire.duration_text(wait_s)}
        try:
            async with asyncio.timeout(wait_s * (1.0 + _WAIT_JITTER) + self._settings.call_timeout_s):
                return await self._send(method="GET", path=path, params=params, body=b"")
        except TimeoutError:
            raise self._unavailable("did not answer in time", reason="registry_timeout") from None

    async def _send(
        self, *, method: str, path: str, params: Mapping[str, str], body: bytes | Mapping[str, Any]
    ) -> ConsulResponse:
        # `encoded`: callers have quoted the path, and yarl would normalise it.
        url = URL(f"{self._origin}{path}?{urlencode(params, quote_via=quote)}", encoded=True)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with self._opened().request(
                method,
                url,
                data=data or None,
                allow_redirects=False,
                server_hostname=self._settings.server_name or None,
            ) as response:
                content = await self._read(response)
        except aiohttp.ClientSSLError as error:
            raise self._unavailable(f"failed the TLS handshake ({error})", reason="registry_certificate") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unavailable(
                f"cannot be reached ({connection_cause(error)})", reason="registry_unreachable"
            ) from error
        if response.status != 200:
            raise wire.failure(response.status, content.decode(errors="replace"))
        index = response.headers.get(_INDEX_HEADER, "")
        return ConsulResponse(index=int(index) if is_whole_number(index) else 0, body=content)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self._settings.answer_bytes_max
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > limit:
                # Leaving the response unread closes its connection.
                raise self._unavailable(f"answered more than {limit} bytes", reason="registry_answer_too_large")
        return bytes(content)

    def _opened(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise UnavailableError("this registry client is closed", reason="registry_closed")
        if self._session is None:
            headers = {"X-Consul-Token": self._token} if self._token else {}
            self._session = aiohttp.ClientSession(
                # No limit here: slots limit calls and `watches_max` limits watches, so that neither waits for the other.
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
            )
        return self._session

    async def aclose(self) -> None:
        """Aborts calls in flight and closes all connections. Idempotent."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _unavailable(self, what: str, reason: str) -> UnavailableError:
        return UnavailableError(f"the registry at {self._origin} {what}", reason=reason)


def token_of(settings: DiscoverySettings) -> str:
    """Returns the token in the settings or in their file. InvalidRequestError when the file cannot be read."""
    if settings.token or not settings.token_file:
        return settings.token
    return read_private(settings.token_file, field="discovery.token_file").decode(errors="replace")


def origin(settings: DiscoverySettings) -> str:
    """scheme://host:port of an address, which may be host:port or a URL."""
    address = settings.address
    wrong = InvalidRequestError(
        f"address {address!r} is not host:port or an http(s) URL of a Consul agent", field="address"
    )
    try:
        url = urlsplit(address if "://" in address else f"{'https' if settings.ca_file else 'http'}://{address}")
        port = DEFAULT_PORT if url.port is None else url.port
    except ValueError:
        raise wrong from None
    extra = url.path.strip("/") or url.query or url.fragment or url.username
    if url.scheme not in ("http", "https") or not url.hostname or not port or extra:
        raise wrong
    return f"{url.scheme}://{host_port(url.hostname, port)}"


def tls_context(settings: DiscoverySettings) -> ssl.SSLContext:
    """Returns a context that verifies the agent by `ca_file` or the system's CAs and presents our certificate, if any."""
    field = "ca_file"
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
        field = "certificate_file"
        if settings.certificate_file:
            context.load_cert_chain(settings.certificate_file, settings.key_file or None)
    except OSError as error:
        raise InvalidRequestError(f"{field} cannot be used: {error}", field=field) from error
    return context


class BlockingQuery:
    """Yields answers of one path: the first immediately, then one per change or per `watch_wait_s`. The rules are those of `watching.py`."""

    def __init__(
        self,
        connection: ConsulConnection,
        path: str,
        *,
        settings: DiscoverySettings,
        clock: Clock,
        generator: Random,
    ) -> None:
        self._connection = connection
        self._path = path
        self._settings = settings
        self._clock = clock
        self._random = generator.random
        self._index = 0

    async def answers(self) -> AsyncGenerator[bytes | MeshError, None]:
        """Never ends. A failure is one item; the next answer comes after a pause that grows, and does not wait for a change."""
        settings = self._settings
        backoff = Backoff(first_s=settings.backoff_first_s, max_s=settings.backoff_max_s, random=self._random)
        while True:
            item: bytes | MeshError
            began_s = self._clock.now()
            try:
                item = await self.next()
                backoff.reset()
                pause_s = began_s + settings.watch_interval_min_s - self._clock.now()
            except MeshError as error:
                item, pause_s, self._index = error, backoff.next_s(), 0
            yield item
            if pause_s > 0:
                await self._clock.sleep(pause_s)

    async def next(self) -> bytes:
        """Returns one answer: the first immediately, later ones after a change or the longest wait."""
        if self._index:
            response = await self._connection.wait(self._path, self._index, random=self._random)
        else:
            response = await self._connection.call("GET", self._path)
        self._index = 0 if response.index < self._index else max(1, response.index)
        return response.body
