"""Leader election by a session of the registry.

The leader holds the lock of a key. Its session expires `ttl_s` after the last renewal (Consul may take twice that), and then another
candidate can take the lock. See https://developer.hashicorp.com/consul/docs/dynamic-app-config/sessions.
"""

import json
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.discovery.base import Registry
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)

TTL_S = 10.0
"""Consul's minimum."""
RENEWALS_PER_TTL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """The value of the key: the leader and its fencing token."""

    member_id: str
    token: int

    def encode(self) -> bytes:
        return json.dumps({"id": self.member_id, "token": self.token}).encode()


def read_leader(value: bytes) -> LeaderRecord:
    """Returns the record, or an empty one if the value is malformed."""
    try:
        record = json.loads(value)
        return LeaderRecord(member_id=str(record["id"]), token=int(record["token"]))
    except (ValueError, TypeError, KeyError):
        return LeaderRecord(member_id="", token=0)


class LeaderElection:
    """One candidate. `run` takes part in elections until it is cancelled, and then gives up the leadership.

    1. `is_leader` becomes False `ttl_s` after the last successful renewal, so that a process that was suspended, or that lost the
       registry, does not believe that it leads.
    2. Every leader's token is larger than those of all earlier leaders. Services that a leader calls refuse older tokens, because rule 1
       cannot stop a call in transit.
    """

    def __init__(self, registry: Registry, key: str, *, member_id: str, clock: Clock, ttl_s: float = TTL_S) -> None:
        self._registry = registry
        self._key = key
        self._member_id = member_id
        self._clock = clock
        self._ttl_s = ttl_s
        self._session_id = ""
        self._leads_until_s = 0.0
        self._token = 0
        """This member's newest token."""
        self._newest_token = 0
        """The largest token that this member has seen. The registry may lose its state, and this machine's clock may be behind."""
        self.leader_id = ""
        """The leader, as far as this member knows."""

    @property
    def is_leader(self) -> bool:
        return self._clock.now() < self._leads_until_s

    @property
    def fencing_token(self) -> int:
        """The token of the present lead; 0 while this member does not lead."""
        return self._token if self.is_leader else 0

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def run(self) -> None:
        """Takes part until it is cancelled."""
        while True:
            try:
                await self._take_turn()
            except MeshError as error:
                # The session is gone, or the registry cannot be reached. The next turn begins with a new session.
                _log.warning("election_interrupted", reason=error.reason, detail=error.message)
                self._session_id = ""
            await self._clock.sleep(self._ttl_s / RENEWALS_PER_TTL)

    async def _take_turn(self) -> None:
        asked_s = self._clock.now()
        if self._session_id:
            await self._registry.renew_session(self._session_id)
        else:
            self._session_id = await self._registry.create_session(
                name=f"{self._key} {self._member_id}", ttl_s=self._ttl_s
            )
        entry = await self._registry.get(self._key)
        record = read_leader(entry.value) if entry is not None else LeaderRecord(member_id="", token=0)
        self._newest_token = max(self._newest_token, record.token)
        # A key without a session has no leader.
        if entry is not None and entry.session:
            self.leader_id = record.member_id
            if entry.session == self._session_id:
                # Counted from before the renewal was sent.
                self._leads_until_s = asked_s + self._ttl_s
            return
        # The wall clock keeps tokens growing after a registry has lost its state, also for a member that has just started.
        mine = LeaderRecord(
            member_id=self._member_id, token=max(self._newest_token, int(1000 * self._clock.wall())) + 1
        )
        if await self._registry.acquire(self._key, session_id=self._session_id, value=mine.encode()):
            self._token = self._newest_token = mine.token
            self.leader_id = self._member_id
            self._leads_until_s = asked_s + self._ttl_s
            _log.info("lead_taken", key=self._key, token=mine.token)

    async def aclose(self) -> None:
        """Gives the lead up, so that another member need not wait for the session to expire."""
        self._leads_until_s = 0.0
        session_id, self._session_id = self._session_id, ""
        if session_id:
            try:
                await self._registry.destroy_session(session_id)
            except MeshError as error:
                _log.warning("session_left", reason=error.reason, detail=error.message)
