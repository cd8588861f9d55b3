"""A service's identity from Consul Connect as a part of its process."""

import asyncio
from collections.abc import Callable, Collection
from random import Random

from kvmesh.clock import Clock
from kvmesh.discovery.connect.certificates import ConnectCertificates
from kvmesh.discovery.connect.intentions import ConnectIntentions
from kvmesh.discovery.connection import ConsulConnection
from kvmesh.discovery.retry import Backoff
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.permissions import OnDenied
from kvmesh.identity.roles import SERVING, MeshRole


class ConnectIdentity:
    """A `CertificateSource` and the `Intentions` of one service; a `RunningPart`, which must start before servers and clients.

    The service may become another one while it runs (`prepare`). Connections that exist keep the earlier certificate.
    """

    def __init__(
        self, settings: DiscoverySettings, role: MeshRole, *, clock: Clock, generator: Random, wait_s: float
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._generator = generator
        self._wait_s = wait_s
        self._connection = ConsulConnection(settings)
        self._certificates, self._intentions = self._parts_of(role)
        self._changed, self._closed = asyncio.Event(), asyncio.Event()

    def current(self) -> Certificates:
        """See `CertificateSource.current`. UnavailableError before `start`."""
        return self._certificates.current()

    def seconds_left(self) -> float:
        """See `ConnectCertificates.seconds_left`."""
        return self._certificates.seconds_left()

    def allows(self, role: MeshRole) -> bool:
        """See `Intentions.allows`."""
        return self._intentions is not None and self._intentions.allows(role)

    def on_denied(self, callback: OnDenied) -> None:
        """See `Intentions.on_denied`. The callbacks stay when the service becomes another one."""
        if self._intentions is not None:
            self._intentions.on_denied(callback)

    async def start(self) -> None:
        """Waits for the certificate and the intentions. UnavailableError after `wait_s`, with the last cause."""
        backoff = Backoff(
            first_s=self._settings.backoff_first_s, max_s=self._settings.backoff_max_s, random=self._generator.random
        )
        cause: MeshError | None = None
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    try:
                        return await self._fetch(self._certificates, self._intentions)
                    except MeshError as error:
                        cause = error
                    await self._clock.sleep(backoff.next_s())
        except TimeoutError:
            why = cause.message if cause is not None else "no answer"
            raise UnavailableError(
                f"Consul gave kvmesh-{self._certificates.role} no certificate and intentions within {self._wait_s:g} s: {why}",
                reason="identity_missing",
            ) from cause

    async def run(self) -> None:
        """Follows Consul until `aclose`."""
        while not self._closed.is_set():
            # Each iteration follows the certificate of one role. `_change` begins the next one.
            self._changed.clear()
            following = asyncio.ensure_future(self._follow())
            waiting = [asyncio.ensure_future(event.wait()) for event in (self._changed, self._closed)]
            try:
                await asyncio.wait({following, *waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()
                await _cancelled(following)

    async def prepare(self, role: MeshRole) -> Callable[[], None]:
        """Gets the certificate and the intentions of another role's service.

        MeshError if Consul refuses. The returned function switches to them; until it is called, nothing changes.
        """
        certificates, intentions = self._parts_of(role)
        await self._fetch(certificates, intentions)
        return lambda: self._change(certificates, intentions)

    def _change(self, certificates: ConnectCertificates, intentions: ConnectIntentions | None) -> None:
        if intentions is not None and self._intentions is not None:
            intentions.take_callbacks(self._intentions)
        self._certificates, self._intentions = certificates, intentions
        self._changed.set()

    async def aclose(self) -> None:
        """Ends `run`. The certificate stays, for channels and servers that close after this."""
        self._closed.set()
        await asyncio.sleep(0)  # Lets `run` end its queries before their connection closes.
        await self._connection.aclose()

    def _parts_of(self, role: MeshRole) -> tuple[ConnectCertificates, ConnectIntentions | None]:
        certificates = ConnectCertificates(
            connection=self._connection,
            settings=self._settings,
            role=role,
            clock=self._clock,
            generator=self._generator,
        )
        if role not in SERVING:
            return certificates, None
        intentions = ConnectIntentions(
            connection=self._connection,
            settings=self._settings,
            destination=role,
            clock=self._clock,
            generator=self._generator,
        )
        return certificates, intentions

    @staticmethod
    async def _fetch(certificates: ConnectCertificates, intentions: ConnectIntentions | None) -> None:
        await certificates.fetch()
        if intentions is not None:
            await intentions.fetch()

    async def _follow(self) -> None:
        followers: Collection[ConnectCertificates | ConnectIntentions] = [
            each for each in (self._certificates, self._intentions) if each is not None
        ]
        async with asyncio.TaskGroup() as tasks:
            for each in followers:
                tasks.create_task(each.follow(), name="connect")


async def _cancelled(task: "asyncio.Future[None]") -> None:
    """Ends the task. Raises its failure if it had failed before."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
