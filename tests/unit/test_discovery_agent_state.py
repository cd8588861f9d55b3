"""The state of the embedded agent, without I/O and with explicit times."""

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import binary, booleans, sampled_from

from kvmesh.discovery.agent.keys import Keys, SessionDefinition
from kvmesh.discovery.agent.records import CheckDefinition, Counter, ServiceDefinition
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.base import Health
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError


def service(
    service_id: str, name: str = "svc", *, ttl_s: float = 6.0, forget_s: float | None = 60.0
) -> ServiceDefinition:
    check = CheckDefinition(
        check_id=f"{service_id}:ttl", name="heartbeat", kind="ttl", ttl_s=ttl_s, deregister_after_s=forget_s
    )
    return ServiceDefinition(service_id=service_id, name=name, address="h", port=1, tags=(), meta={}, checks=(check,))


def status(state: AgentState, service_id: str) -> Health:
    return state.catalog.services[service_id].checks[f"{service_id}:ttl"].status


def test_a_check_turns_critical_when_its_heartbeat_is_overdue() -> None:
    """A check turns critical when its TTL has passed since the last heartbeat. `next_deadline` returns that time."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a"), 0.0)
    assert status(state, "a") is Health.CRITICAL
    state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=1.0)
    assert state.next_deadline() == 7.0
    state.advance(6.9)
    state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=6.9)
    state.advance(12.8)
    assert status(state, "a") is Health.PASSING
    state.advance(12.9)
    assert status(state, "a") is Health.CRITICAL
    assert state.catalog.services["a"].checks["a:ttl"].output == "TTL expired"


def test_a_critical_instance_is_deregistered_after_its_time() -> None:
    """The time until deregistration starts when the instance turns critical. A passing check in between restarts it."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a"), 0.0)
    state.advance(59.9)
    state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=59.9)
    state.advance(65.9)
    assert status(state, "a") is Health.CRITICAL
    assert state.next_deadline() == pytest.approx(125.9)
    state.advance(125.8)
    assert "a" in state.catalog.services
    state.advance(126.0)
    assert "a" not in state.catalog.services
    assert state.next_deadline() is None
    with pytest.raises(NotFoundError):
        state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=126.0)


def test_maintenance_has_no_deadline_and_is_idempotent() -> None:
    """A drain mark stays until it is removed. Setting it again changes neither the mark nor the index."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a", forget_s=None), 0.0)
    state.catalog.set_maintenance("a", True, "why")
    index = state.index
    state.catalog.set_maintenance("a", True, "other")
    assert state.index == index
    state.advance(1e9)
    mark = state.catalog.services["a"].checks["_service_maintenance:a"]
    assert (mark.status, mark.notes) == (Health.CRITICAL, "why")
    state.catalog.set_maintenance("a", False, "")
    assert list(state.catalog.services["a"].checks) == ["a:ttl"]


def test_second_registration_keeps_state() -> None:
    """Checks that are registered again keep their status and restart their TTL. Checks that the new registration lacks are removed."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a"), 0.0)
    state.catalog.heartbeat("a:ttl", Health.PASSING, "fine", now=0.0)
    state.catalog.set_maintenance("a", True, "why")
    created = state.catalog.services["a"].create_index
    state.catalog.register(service("a", ttl_s=10.0), 5.0)
    assert status(state, "a") is Health.PASSING
    assert state.catalog.services["a"].create_index == created
    assert "_service_maintenance:a" in state.catalog.services["a"].checks
    state.advance(14.9)
    assert status(state, "a") is Health.PASSING
    state.advance(15.0)
    assert status(state, "a") is Health.CRITICAL
    state.catalog.register(replace(service("a"), checks=()), 16.0)
    with pytest.raises(NotFoundError):
        state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=16.0)


def test_a_check_of_another_service_is_refused() -> None:
    """Two instances cannot share a check id, because one's heartbeat would keep the other passing."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a"), 0.0)
    with pytest.raises(InvalidRequestError):
        state.catalog.register(replace(service("b"), checks=service("a").checks), 0.0)
    assert list(state.catalog.services) == ["a"]


def test_the_index_of_a_name_changes_only_with_its_instances() -> None:
    """Changes of other names, and heartbeats that change nothing, do not wake up a watch of the name."""
    state = AgentState(AgentSettings())
    state.catalog.register(service("a", "one"), 0.0)
    state.catalog.register(service("b", "two"), 0.0)
    one = state.catalog.name_index("one")
    state.catalog.heartbeat("b:ttl", Health.PASSING, "", now=0.0)
    state.catalog.set_maintenance("b", True, "")
    assert state.catalog.name_index("one") == one
    state.catalog.heartbeat("a:ttl", Health.PASSING, "", now=0.0)
    changed = state.catalog.name_index("one")
    assert changed > one
    state.catalog.heartbeat("a:ttl", Health.PASSING, "another output", now=1.0)
    assert state.catalog.name_index("one") == changed


def test_index_of_a_name_never_goes_backwards() -> None:
    """The index does not decrease when the last instance leaves, when another name's instance leaves, or when an instance is renamed."""
    state = AgentState(AgentSettings(), first_index=100)
    seen = [state.catalog.name_index("one")]
    assert seen[0] >= 100

    def step() -> None:
        seen.append(state.catalog.name_index("one"))

    state.catalog.register(service("a", "one"), 0.0)
    step()
    state.catalog.deregister("a")
    step()
    state.catalog.register(service("b", "two"), 0.0)
    state.catalog.deregister("b")
    step()
    state.catalog.register(service("a", "one"), 0.0)
    step()
    state.catalog.register(service("a", "two"), 0.0)
    step()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5


def test_the_number_of_services_is_limited() -> None:
    """A registration beyond the limit is refused. A registered service can still change."""
    state = AgentState(AgentSettings(services_max=1))
    state.catalog.register(service("a"), 0.0)
    with pytest.raises(OverloadedError):
        state.catalog.register(service("b"), 0.0)
    state.catalog.register(service("a", ttl_s=9.0), 0.0)


def session_definition(ttl_s: float = 10.0, *, delay_s: float = 0.0) -> SessionDefinition:
    return SessionDefinition(name="n", ttl_s=ttl_s, lock_delay_s=delay_s)


def test_an_expired_session_releases_its_locks() -> None:
    """The session expires at its TTL after the last renewal. Then its lock is free, and the session is unknown."""
    state = AgentState(AgentSettings())
    state.sessions.create("one", session_definition(), 0.0)
    assert state.acquire("k", "one", b"1", now=0.0)
    state.sessions.renew("one", 8.0)
    state.advance(17.9)
    record = state.keys.get("k")
    assert record is not None
    assert record.session == "one"
    state.advance(18.0)
    freed = state.keys.get("k")
    assert freed is not None
    assert (freed.session, freed.value, freed.lock_index) == ("", b"1", 1)
    assert freed.modify_index > record.modify_index
    with pytest.raises(NotFoundError):
        state.sessions.renew("one", 18.0)
    with pytest.raises(NotFoundError):
        state.acquire("k", "one", b"", now=18.0)


def test_the_lock_delay_blocks_other_sessions() -> None:
    """No session can take the lock of a lost session during the delay. A released lock is free immediately."""
    state = AgentState(AgentSettings())
    state.sessions.create("one", session_definition(delay_s=15.0), 0.0)
    state.sessions.create("two", session_definition(1000.0), 0.0)
    assert state.acquire("k", "one", b"", now=0.0)
    state.destroy_session("one", 1.0)
    assert not state.acquire("k", "two", b"", now=15.9)
    assert state.acquire("k", "two", b"", now=16.0)
    assert state.keys.release("k", "two", b"")
    state.sessions.create("three", session_definition(1000.0), 16.0)
    assert state.acquire("k", "three", b"", now=16.0)


def test_keys_are_limited_in_number_and_bytes() -> None:
    """A write beyond a limit is refused and changes nothing. A deleted key frees its bytes."""
    keys = Keys(Counter(), keys_max=2, bytes_max=10)
    assert keys.put("a", b"12345")
    with pytest.raises(OverloadedError):
        keys.put("b", b"12345")
    assert keys.put("b", b"123")
    with pytest.raises(OverloadedError):
        keys.put("c", b"")
    with pytest.raises(OverloadedError):
        keys.put("a", b"123456")
    assert keys.held_bytes == 10
    keys.delete("a")
    assert keys.put("c", b"12345")


NAMES = sampled_from(["a", "a/b", "b"])
SESSIONS = sampled_from(["one", "two"])


class KeysAgainstADictionary(RuleBasedStateMachine):
    """Random operations give the same results as a dictionary, and the byte count stays right."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = Keys(Counter(), keys_max=100, bytes_max=10_000)
        self.values: dict[str, bytes] = {}
        self.holders: dict[str, str] = {}
        self.index = 0

    @rule(key=NAMES, value=binary(max_size=4), is_stale=booleans(), is_conditional=booleans())
    def put(self, key: str, value: bytes, is_stale: bool, is_conditional: bool) -> None:
        record = self.keys.get(key)
        index = (record.modify_index if record else 0) + is_stale
        done = self.keys.put(key, value, expected_index=index if is_conditional else None)
        assert done is not (is_conditional and is_stale)
        if done:
            self.values[key] = value

    @rule(key=NAMES)
    def delete(self, key: str) -> None:
        self.keys.delete(key)
        self.values.pop(key, None)
        self.holders.pop(key, None)

    @rule(key=NAMES, session=SESSIONS, value=binary(max_size=4))
    def acquire(self, key: str, session: str, value: bytes) -> None:
        done = self.keys.acquire(key, session, value, now=0.0)
        assert done is (self.holders.get(key, session) == session)
        if done:
            self.values[key], self.holders[key] = value, session

    @rule(key=NAMES, session=SESSIONS)
    def release(self, key: str, session: str) -> None:
        done = self.keys.release(key, session, b"r")
        assert done is (self.holders.get(key) == session)
        if done:
            self.values[key] = b"r"
            del self.holders[key]

    @rule(session=SESSIONS)
    def drop(self, session: str) -> None:
        self.keys.drop_session(session, lock_delay_s=0.0, now=0.0)
        for key in [key for key, holder in self.holders.items() if holder == session]:
            del self.holders[key]

    @invariant()
    def agrees(self) -> None:
        records = self.keys.under("")
        assert {record.key: record.value for record in records} == self.values
        assert {record.key: record.session for record in records if record.session} == self.holders
        assert self.keys.held_bytes == sum(len(key) + len(value) for key, value in self.values.items())
        assert self.keys.index >= self.index
        assert all(record.modify_index <= self.keys.index for record in records)
        self.index = self.keys.index


TestKeysAgainstADictionary = KeysAgainstADictionary.TestCase
TestKeysAgainstADictionary.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
