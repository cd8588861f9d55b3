"""Attacks on seals: registrations and KV handles that are forged, altered, replayed, or used by another reader."""

import json
from dataclasses import replace
from pathlib import Path

from kvmesh.core import Generation, KvHandle, KvReader
from kvmesh.discovery.base import DECODE, Registration, Registry
from kvmesh.discovery.sealed import SealedRegistry
from kvmesh.errors import KvLostError
from kvmesh.identity.secret import MeshSecret
from kvmesh.kv.seals import CLOCK_SKEW_S, HandleSeals, SealScope
from kvmesh.simulation.registry import MemoryAgent

MINE = Registration(service=DECODE, instance_id="d1", host="10.0.0.1", port=7, meta={"epoch": "5", "role": "decode"})
SECRET = MeshSecret(b"s" * 32)
READER = KvReader(worker_id="d1", leg_id="r-0")
PROMPT = Generation(model="m", token_ids=list(range(40)), cache_salt="tenant")
SCOPE = SealScope.of(READER, PROMPT)
HANDLE = KvHandle(
    handle_id="h",
    format="f",
    compatibility_hash="c",
    payload=b"blocks",
    worker_id="p1",
    worker_epoch=7,
    tokens=40,
    lease_s=30.0,
    kv_bytes=1024,
)


class SettableClock:
    """A settable wall clock."""

    wall_s = 1_000_000.0

    def __call__(self) -> float:
        return self.wall_s


def is_refused(seals: HandleSeals, handle: KvHandle, scope: SealScope = SCOPE) -> bool:
    try:
        seals.use(handle, scope)
    except KvLostError as error:
        return error.reason == "kv_seal"
    return False


def test_a_handle_is_valid_for_one_reader_request_and_prompt() -> None:
    """A genuine handle is refused if any sealed field of it changes, or for another worker, leg, prompt, tenant or adapter."""
    sealed = HandleSeals(SECRET, SettableClock()).seal(HANDLE, SCOPE)
    for change in (
        {"seal": b""},
        {"seal": sealed.seal[:-1]},
        {"seal": bytes(8) + sealed.seal[8:]},
        {"handle_id": "h2"},
        {"format": "g"},
        {"compatibility_hash": "d"},
        {"payload": b"blockt"},
        {"worker_id": "p2"},
        {"worker_epoch": 8},
        {"tokens": 41},
        {"kv_bytes": 1025},
        {"first_token_ids": (1,)},
    ):
        assert is_refused(HandleSeals(SECRET, SettableClock()), replace(sealed, **change)), change  # type: ignore[arg-type]
    for scope in (
        SealScope.of(replace(READER, worker_id="d2"), PROMPT),
        SealScope.of(replace(READER, leg_id="r-1"), PROMPT),
        SealScope.of(READER, replace(PROMPT, token_ids=[*range(39), 99])),
        SealScope.of(READER, replace(PROMPT, cache_salt="other tenant")),
        SealScope.of(READER, replace(PROMPT, adapter="other")),
    ):
        assert is_refused(HandleSeals(SECRET, SettableClock()), sealed, scope)
    forged = HandleSeals(MeshSecret(b"o" * 32), SettableClock()).seal(HANDLE, SCOPE)
    assert is_refused(HandleSeals(SECRET, SettableClock()), forged)
    # The lease is not sealed, because it is the time that remains.
    assert not is_refused(HandleSeals(SECRET, SettableClock()), replace(sealed, lease_s=1.0))


def test_a_handle_is_valid_once_and_until_it_expires() -> None:
    """A handle is refused if it is used again, or after its lease and the allowed clock skew."""
    now = SettableClock()
    seals = HandleSeals(SECRET, now)
    first, second = (seals.seal(replace(HANDLE, handle_id=name), SCOPE) for name in ("h1", "h2"))
    assert not is_refused(seals, first)
    assert is_refused(seals, first)
    now.wall_s += HANDLE.lease_s + CLOCK_SKEW_S - 1
    assert is_refused(seals, first)
    assert not is_refused(seals, second)
    now.wall_s += 2
    assert is_refused(seals, first) and is_refused(seals, second)


async def listed_ids(inner: Registry, secret: MeshSecret) -> list[str]:
    return [each.instance_id for each in (await SealedRegistry(inner, secret).instances(DECODE)).instances]


async def test_a_seal_is_valid_for_one_registration() -> None:
    """A copy of a member's registration with any change is refused, and so is a registration that is sealed with another secret."""
    secret, other = MeshSecret(b"s" * 32), MeshSecret(b"o" * 32)
    agent = MemoryAgent()
    inner = agent.registry()
    await SealedRegistry(inner, secret).register(MINE)  # type: ignore[arg-type]
    (genuine,) = (await inner.instances(DECODE)).instances
    assert await listed_ids(inner, secret) == ["d1"]  # type: ignore[arg-type]
    copy = replace(MINE, meta=dict(genuine.meta))
    forgeries = (
        MINE,
        replace(copy, host="10.6.6.6"),
        replace(copy, port=8),
        replace(copy, meta={**genuine.meta, "epoch": "6"}),
        replace(copy, meta={**genuine.meta, "label-zone": "a"}),
        replace(copy, meta={**genuine.meta, "seal": "nonsense"}),
        replace(copy, instance_id="d2"),
    )
    for forged in forgeries:
        await inner.register(forged)
        assert "d1" not in await listed_ids(inner, secret) if forged.instance_id == "d1" else True  # type: ignore[arg-type]
        assert "d2" not in await listed_ids(inner, secret)  # type: ignore[arg-type]
    await SealedRegistry(inner, other).register(MINE)  # type: ignore[arg-type]
    assert await listed_ids(inner, secret) == []  # type: ignore[arg-type]
    await inner.register(copy)
    assert await listed_ids(inner, secret) == ["d1"]  # type: ignore[arg-type]  # It refers to the member itself.
    assert json.dumps(dict(genuine.meta)).count("seal") == 1


def test_the_text_of_a_secret_does_not_reveal_it(tmp_path: Path) -> None:
    """A secret's text and representation do not contain it, so that logs cannot reveal it."""
    (tmp_path / "secret").write_text("t" * 40)
    secret = MeshSecret.from_file(str(tmp_path / "secret"))
    assert "t" * 10 not in f"{secret!r} {secret}"
