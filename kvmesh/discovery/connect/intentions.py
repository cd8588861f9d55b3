"""Consul's intentions for the calls of one service: the server decides for each role, and a blocking query says when to ask again."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from random import Random

from kvmesh.clock import Clock
from kvmesh.discovery.connect.documents import read_allowed
from kvmesh.discovery.connection import BlockingQuery, ConsulConnection
from kvmesh.discovery.retry import Backoff
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.identity.permissions import OnDenied, callers_of
from kvmesh.identity.roles import SERVICE_PREFIX, MeshRole

LIST_PATH = "/v1/connect/intentions"
CHECK_PATH = "/v1/connect/intentions/check"
_log = event_logger(__name__)


class ConnectIntentions:
    """`Intentions` of one destination. Without an answer the last known rules stay; before the first nothing is allowed.

    Consul's own check decides, so that precedence, wildcards and the default are Consul's. The agent's `authorize` would, too, but from
    a cache that may be older than the change that was just seen. (The `match` query of Consul 1.8 does not block.)
    """

    def __init__(
        self,
        *,
        connection: ConsulConnection,
        settings: DiscoverySettings,
        destination: MeshRole,
        clock: Clock,
        generator: Random,
    ) -> None:
        self.destination = destination
        self._callers = sorted(callers_of(destination))
        self._connection = connection
        self._clock = clock
        self._query = BlockingQuery(connection, LIST_PATH, settings=settings, clock=clock, generator=generator)
        self._backoff = Backoff(first_s=settings.backoff_first_s, max_s=settings.backoff_max_s, random=generator.random)
        self._allowed: frozenset[MeshRole] = frozenset()
        self._callbacks: list[OnDenied] = []
        self._is_away = False

    def allows(self, role: MeshRole) -> bool:
        return role in self._allowed

    def on_denied(self, callback: OnDenied) -> None:
        self._callbacks.append(callback)

    async def fetch(self) -> None:
        """Asks for every role that has a method to call here. MeshError if one cannot be decided; then all rules stay as they were."""
        # Waits for all checks, so that a failed one leaves no other one running.
        answers = await asyncio.gather(*(self._check(role) for role in self._callers), return_exceptions=True)
        decided: dict[MeshRole, bool] = {}
        for role, answer in zip(self._callers, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            decided[role] = answer
        self._use(decided)

    async def follow(self) -> None:
        """Until it is cancelled. Asks after every change of any intention, and once per longest wait."""
        async with aclosing(self._query.answers()) as answers:
            async for answer in answers:
                if isinstance(answer, MeshError):
                    self._on_failure(answer)
                else:
                    await self._fetch_until_done()

    async def _fetch_until_done(self) -> None:
        self._backoff.reset()
        while True:
            try:
                await self.fetch()
            except MeshError as error:
                self._on_failure(error)
                await self._clock.sleep(self._backoff.next_s())
            else:
                break
        if self._is_away:
            self._is_away = False
            _log.info("intentions_followed_again", consul_service=SERVICE_PREFIX + self.destination)

    async def _check(self, source: MeshRole) -> bool:
        params = {"source": SERVICE_PREFIX + source, "destination": SERVICE_PREFIX + self.destination}
        return read_allowed((await self._connection.call("GET", CHECK_PATH, params=params)).body)

    def _use(self, decided: Mapping[MeshRole, bool]) -> None:
        earlier, self._allowed = self._allowed, frozenset(role for role, allowed in decided.items() if allowed)
        if earlier == self._allowed:
            return
        _log.info(
            "intentions_changed",
            consul_service=SERVICE_PREFIX + self.destination,
            allowed=sorted(self._allowed),
        )
        if denied := earlier - self._allowed:
            for callback in self._callbacks:
                callback(denied)

    def take_callbacks(self, earlier: "ConnectIntentions") -> None:
        """Takes over the callbacks of `earlier`, and calls them with the roles that it allowed and this one denies."""
        self._callbacks = earlier._callbacks
        if denied := earlier._allowed - self._allowed:
            for callback in self._callbacks:
                callback(denied)

    def _on_failure(self, error: MeshError) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning(
                "intentions_not_followed",
                consul_service=SERVICE_PREFIX + self.destination,
                reason=error.reason,
                detail=error.message,
                effect="the last known intentions stay",
            )
