"""TLS for servers whose certificates have a SPIFFE ID and no other name, as those of Consul from 1.11 on.

gRPC's Python library compares DNS names and common names only. So its channel connects in plain text to a socket in a folder that only this
user can enter. The relay behind that socket makes the TLS connection, compares the SPIFFE ID, and copies bytes both ways.
"""

import asyncio
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from cryptography import x509

from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.secret import write_private
from kvmesh.network.names import split_host_port
from kvmesh.rpc.settings import RpcSettings

CHUNK_BYTES = 256 << 10
BACKLOG = 16
_log = event_logger(__name__)


class TlsRelay:
    """The sockets of one pool of channels. Every method must be called in the pool's event loop."""

    def __init__(self, settings: RpcSettings) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._numbers = count()
        self._newest: tuple[Certificates, ssl.SSLContext] | None = None
        self._listeners: dict[str, asyncio.Task[None]] = {}

    def open(self, address: str, certificates: Certificates, server_uri: str) -> str:
        """Returns a target for a plain channel. Its connections go to `address`, and close immediately unless the server has the SPIFFE ID."""
        path = self._own_folder() / str(next(self._numbers))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(BACKLOG)  # Connections wait here until the task below accepts them.
        connection = _Connection(address, self._settings, context=self._context(certificates), server_uri=server_uri)
        target = f"unix:{path}"
        self._listeners[target] = asyncio.get_running_loop().create_task(_serve(listener, connection.run, path))
        return target

    async def close(self, target: str) -> None:
        """Ends the target's connections. Idempotent."""
        task = self._listeners.pop(target, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def aclose(self) -> None:
        """Ends all targets and removes the folder. Idempotent."""
        for target in tuple(self._listeners):
            await self.close(target)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kvmesh-tls-"))
        return self._folder

    def _context(self, certificates: Certificates) -> ssl.SSLContext:
        """Made once per certificate; the earlier one's channels keep theirs."""
        if self._newest is None or self._newest[0] is not certificates:
            self._newest = (certificates, _client_context(certificates, self._own_folder()))
        return self._newest[1]


def _client_context(certificates: Certificates, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # The SPIFFE ID is compared instead.
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificates.authority.decode())
    context.set_alpn_protocols(["h2"])
    pair = folder / "pair.pem"  # The ssl module reads files only.
    write_private(pair, certificates.certificate + b"\n" + certificates.key)
    try:
        context.load_cert_chain(pair)
    finally:
        pair.unlink()
    return context


_Run = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def _serve(listener: socket.socket, run: _Run, path: Path) -> None:
    """Accepts until it is cancelled; then it ends its connections."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(run(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_unix_server(accept, sock=listener, limit=CHUNK_BYTES)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tuple(tasks))
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


class _Connection:
    """Connects to one server."""

    def __init__(self, address: str, settings: RpcSettings, *, context: ssl.SSLContext, server_uri: str) -> None:
        self._address = address
        self._context = context
        self._server_uri = server_uri
        self._settings = settings

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side closes. A server that cannot be reached or verified closes the plain connection."""
        try:
            host, port = split_host_port(self._address)
            async with asyncio.timeout(self._settings.connect_timeout_s):
                # An empty `server_hostname` is allowed by asyncio: no SNI, and no comparison of names.
                far_reader, far_writer = await asyncio.open_connection(
                    host, port, ssl=self._context, server_hostname="", limit=CHUNK_BYTES
                )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError.
            _log.debug("relay_not_connected", address=self._address, detail=f"{type(error).__name__}: {error}")
            return
        try:
            if not self._is_expected(far_writer):
                return
            await _copy_both((reader, far_writer), (far_reader, writer))
        finally:
            far_writer.transport.abort()  # TLS's closing handshake would outlive this call, and no one reads the rest.

    def _is_expected(self, writer: asyncio.StreamWriter) -> bool:
        # gRPC sets this option on its TCP sockets (gRFC A18), but its socket here is a Unix socket.
        plain = writer.get_extra_info("socket")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._settings.keepalive_timeout_s * 1000))
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        uris = _uris(x509.load_der_x509_certificate(shown))
        # Exactly one URI, as the X.509-SVID standard of SPIFFE demands.
        if uris == [self._server_uri]:
            return True
        _log.warning("server_refused", address=self._address, expected=self._server_uri, shown=[u[:256] for u in uris])
        return False


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


_Way = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _copy_both(*ways: _Way) -> None:
    """Until one way ends: HTTP/2 closes connections as a whole."""
    copying = [asyncio.ensure_future(_copy(*way)) for way in ways]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copying:
            each.cancel()
        await asyncio.wait(copying)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
