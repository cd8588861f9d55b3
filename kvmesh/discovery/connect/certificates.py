"""A service's certificate and the roots of its peers, kept up to date by blocking queries of Consul's agent."""

import asyncio
from contextlib import aclosing
from functools import partial
from random import Random

from kvmesh.clock import Clock
from kvmesh.discovery.connect.documents import Issued, read_issued
from kvmesh.discovery.connection import BlockingQuery, ConsulConnection
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import SERVICE_PREFIX, MeshRole

ROOTS_PATH = "/v1/agent/connect/ca/roots"
LEAF_PATH = "/v1/agent/connect/ca/leaf/"
EXPIRY_CHECK_S = 30.0
_log = event_logger(__name__)


class ConnectCertificates:
    """A `CertificateSource`. The last usable certificates stay in use while the agent is unreachable or its answers are unusable.

    During a change of the root all roots that Consul lists are trusted, and Consul adds the new root, signed by the old one, to
    certificates: members that know one root only can verify the others in both directions.
    """

    def __init__(
        self,
        *,
        connection: ConsulConnection,
        settings: DiscoverySettings,
        role: MeshRole,
        clock: Clock,
        generator: Random,
    ) -> None:
        self.role = role
        self._clock = clock
        make_query = partial(BlockingQuery, connection, settings=settings, clock=clock, generator=generator)
        self._roots_query = make_query(ROOTS_PATH)
        self._leaf_query = make_query(f"{LEAF_PATH}{SERVICE_PREFIX}{role}")
        self._leaf = self._roots = b""
        self._issued: Issued | None = None
        self._is_away = self._is_expired = False

    def current(self) -> Certificates:
        """See `CertificateSource.current`. UnavailableError before the first."""
        if self._issued is None:
            raise UnavailableError("Consul has not issued a certificate yet", reason="identity_missing")
        return self._issued.certificates

    def seconds_left(self) -> float:
        """Until the certificate expires; negative afterwards, 0 before the first."""
        return 0.0 if self._issued is None else self._issued.expires_at.timestamp() - self._clock.wall()

    async def fetch(self) -> None:
        """Both documents once. MeshError if they cannot be read or used."""
        self._roots = await self._roots_query.next()
        self._leaf = await self._leaf_query.next()
        self._use(read_issued(leaf=self._leaf, roots=self._roots, role=self.role))

    async def follow(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._roots_query), name="connect roots")
            tasks.create_task(self._follow(self._leaf_query), name="connect leaf")
            tasks.create_task(self._watch_expiry(), name="connect expiry")

    async def _follow(self, query: BlockingQuery) -> None:
        async with aclosing(query.answers()) as answers:
            async for answer in answers:
                if isinstance(answer, MeshError):
                    self._on_failure(answer)
                else:
                    self._on_answer(query, answer)

    def _on_answer(self, query: BlockingQuery, answer: bytes) -> None:
        if query is self._leaf_query:
            self._leaf = answer
        else:
            self._roots = answer
        try:
            self._use(read_issued(leaf=self._leaf, roots=self._roots, role=self.role))
        except MeshError as error:
            self._on_failure(error)
            return
        if self._is_away:
            self._is_away = False
            _log.info("certificates_followed_again", consul_service=SERVICE_PREFIX + self.role)

    def _use(self, issued: Issued) -> None:
        earlier, self._issued = self._issued, issued
        if earlier is not None and earlier.certificates == issued.certificates:
            self._issued = earlier  # The same object, so that its users do not reload it.
        elif earlier is not None:
            self._is_expired = False
            _log.info(
                "certificates_renewed",
                consul_service=SERVICE_PREFIX + self.role,
                expires_at=issued.expires_at.isoformat(),
            )

    def _on_failure(self, error: MeshError) -> None:
        if self._is_away:
            return
        self._is_away = True
        expires_at = self._issued.expires_at.isoformat() if self._issued is not None else ""
        _log.warning(
            "certificates_not_renewed",
            consul_service=SERVICE_PREFIX + self.role,
            reason=error.reason,
            detail=error.message,
            expires_at=expires_at,
        )

    async def _watch_expiry(self) -> None:
        while True:
            if self._issued is not None and not self._is_expired and self.seconds_left() <= 0:
                self._is_expired = True
                _log.error(
                    "certificate_expired",
                    consul_service=SERVICE_PREFIX + self.role,
                    effect="new connections fail; those that exist go on",
                )
            await self._clock.sleep(EXPIRY_CHECK_S)
