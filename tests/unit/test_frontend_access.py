"""API keys and quotas: parsing of key files, authentication and accounting."""

import json
import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError, UnauthenticatedError
from services.frontend.access import quotas as quotas_module
from services.frontend.access.caller import Caller, Quota
from services.frontend.access.keys import hash_of, read_keys
from services.frontend.access.quotas import CONCURRENCY, REQUESTS, TOKENS, Quotas, TokenBucket


def document(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"keys": rows}).encode()


def row(key: str = "secret", **more: Any) -> dict[str, Any]:
    return {"tenant": "acme", "key_sha256": hash_of(key), **more}


def caller(**quota: int) -> Caller:
    return Caller(tenant="acme", quota=Quota(**quota))


def test_a_key_is_found_by_its_hash_and_expires() -> None:
    """A valid key identifies its tenant until it expires. The hash of a key is not a key."""
    book = read_keys(document(row(models=["demo"], tokens_per_minute=5, expires_at="2030-01-01T00:00:00+00:00")))
    found = book.find("secret", wall_s=0)
    assert (found.tenant, found.models, found.quota.tokens_per_minute) == ("acme", frozenset({"demo"}), 5)
    with pytest.raises(UnauthenticatedError, match="unknown"):
        book.find(hash_of("secret"), wall_s=0)
    with pytest.raises(UnauthenticatedError, match="expired"):
        book.find("secret", wall_s=1893456000)
    found.check_model("demo")
    with pytest.raises(NotFoundError):
        found.check_model("other")


def test_all_problems_of_a_document_are_reported_at_once() -> None:
    """All problems of a document of keys are reported together, each with its place."""
    bad = [
        row(tenant=""), row(key_sha256="XYZ"), row(requests_per_minute=0), row(models="demo"), row(tennant="x"),
        row(expires_at="tomorrow"), row(tokens_per_minute=True), 7,
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError) as caught:
        read_keys(json.dumps({"keys": bad}).encode())
    assert all(f"keys[{number}]" in caught.value.message for number in range(len(bad)))
    for wrong in (b"", b"[]", b'{"keys": 1}'):
        with pytest.raises(InvalidRequestError):
            read_keys(wrong)
    with pytest.raises(InvalidRequestError, match="twice"):
        read_keys(document(row(), row()))


def test_quotas_for_requests_and_concurrency_state_when_to_retry() -> None:
    """A request beyond a quota is refused with a retry time, after which it is accepted."""
    quotas, tenant_caller = Quotas(), caller(requests_per_minute=2, concurrent_requests=2)
    permits = [quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=1, now_s=0.0) for _ in range(2)]
    with pytest.raises(OverloadedError) as caught:
        quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=1, now_s=0.0)
    assert caught.value.reason == CONCURRENCY
    for permit in permits:
        quotas.leave(permit, Usage(), now_s=0.0)
        quotas.leave(permit, Usage(), now_s=0.0)
    with pytest.raises(OverloadedError) as caught:
        quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=1, now_s=0.0)
    assert caught.value.reason == REQUESTS
    assert caught.value.retry_after_s == pytest.approx(30)
    quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=1, now_s=30.001)


def test_ending_a_request_is_idempotent() -> None:
    """A request that ends several times frees one place and returns its tokens once."""
    quotas, tenant_caller = Quotas(), caller(concurrent_requests=2, tokens_per_minute=100)
    first, _ = (quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=40, now_s=0.0) for _ in range(2))
    for _ in range(3):
        quotas.leave(first, Usage(prompt_tokens=10), now_s=0.0)
    quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=30, now_s=0.0)
    with pytest.raises(OverloadedError) as caught:
        quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=0, now_s=0.0)
    assert caught.value.reason == CONCURRENCY


def test_a_bucket_holds_a_minute_at_most() -> None:
    """After an idle hour, a tenant has no more than one minute's tokens. Shrinking the bucket also reduces its level."""
    bucket = TokenBucket(60, 0.0)
    bucket.take(60)
    assert bucket.level(30.0) == pytest.approx(30)
    assert bucket.level(3600.0) == 60
    assert bucket.wait_s(61, 7200.0) > 0
    bucket.resize(30, 10_000.0)
    assert bucket.level(20_000.0) == 30


def test_reserved_tokens_that_were_not_used_are_returned() -> None:
    """A reservation counts the longest possible answer. At the end the quota counts the real one."""
    quotas, tenant_caller = Quotas(), caller(tokens_per_minute=100)
    permit = quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=80, now_s=0.0)
    with pytest.raises(OverloadedError) as caught:
        quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=10, now_s=0.0)
    assert caught.value.reason == TOKENS
    assert caught.value.retry_after_s == pytest.approx(6)
    quotas.leave(permit, Usage(prompt_tokens=10, output_tokens=5), now_s=0.0)
    quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=75, now_s=0.0)
    with pytest.raises(InvalidRequestError, match="101 tokens"):
        quotas.enter(tenant_caller, prompt_tokens=101, output_tokens_max=1, now_s=0.0)


def test_an_answer_longer_than_the_bucket_is_a_debt() -> None:
    """A reservation is never larger than the bucket, so that the request can run. All used tokens are charged."""
    quotas, tenant_caller = Quotas(), caller(tokens_per_minute=60)
    permit = quotas.enter(tenant_caller, prompt_tokens=10, output_tokens_max=1000, now_s=0.0)
    quotas.leave(permit, Usage(prompt_tokens=10, output_tokens=110), now_s=0.0)
    with pytest.raises(OverloadedError) as caught:
        quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=0, now_s=0.0)
    assert caught.value.retry_after_s == pytest.approx(61)


def test_a_share_of_the_mesh_is_a_share_of_the_quota() -> None:
    """Each of four frontends grants a quarter of the quota. A change of the number of frontends keeps the used tokens."""
    quotas, tenant_caller = Quotas(), caller(tokens_per_minute=100)
    quotas.share = 0.25
    quotas.enter(tenant_caller, prompt_tokens=20, output_tokens_max=5, now_s=0.0)
    with pytest.raises(OverloadedError):
        quotas.enter(tenant_caller, prompt_tokens=5, output_tokens_max=0, now_s=0.0)
    quotas.share = 1.0
    quotas.enter(tenant_caller, prompt_tokens=75, output_tokens_max=0, now_s=0.0)
    with pytest.raises(OverloadedError):
        quotas.enter(tenant_caller, prompt_tokens=1, output_tokens_max=0, now_s=0.0)


def test_idle_tenants_are_evicted_before_new_tenants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded. A tenant with a request in flight stays."""
    monkeypatch.setattr(quotas_module, "TENANTS_MAX", 2)
    quotas = Quotas()
    names = [Caller(tenant=secrets.token_hex(4), quota=Quota(concurrent_requests=1)) for _ in range(4)]
    permit = quotas.enter(names[0], prompt_tokens=1, output_tokens_max=1, now_s=0.0)
    quotas.leave(quotas.enter(names[1], prompt_tokens=1, output_tokens_max=1, now_s=0.0), Usage(), now_s=0.0)
    with pytest.raises(OverloadedError, match="tenants"):
        quotas.enter(names[2], prompt_tokens=1, output_tokens_max=1, now_s=10.0)
    quotas.enter(names[2], prompt_tokens=1, output_tokens_max=1, now_s=60.0)
    with pytest.raises(OverloadedError):
        quotas.enter(names[0], prompt_tokens=1, output_tokens_max=1, now_s=60.0)
    quotas.leave(permit, Usage(), now_s=61.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100), st.integers(0, 120), st.floats(0, 20)), max_size=40))
def test_no_tenant_gets_more_than_its_rate(steps: list[tuple[int, int, int, float]]) -> None:
    """The tokens charged up to any time are at most one bucket, its refill, and the debt of one request."""
    quotas, tenant_caller = Quotas(), caller(tokens_per_minute=100)
    now_s = charged = 0.0
    for prompt, most, used, pause_s in steps:
        now_s += pause_s
        try:
            permit = quotas.enter(tenant_caller, prompt_tokens=prompt, output_tokens_max=most, now_s=now_s)
        except OverloadedError:
            continue
        spent = Usage(prompt_tokens=prompt, output_tokens=min(used, most))
        quotas.leave(permit, spent, now_s=now_s)
        charged += spent.prompt_tokens + spent.output_tokens
        assert charged <= 100 + now_s * 100 / 60 + 50 + 1e-6


def test_batches_of_a_tenant_get_the_rights_that_all_its_keys_share() -> None:
    """A batch of a key with one model must not reach another model through a second key. Without a key the batch ends."""
    rows = (row("a", models=["demo", "other"]), row("b", models=["demo"]), row("c"), row("d", tenant="else"))
    book = read_keys(document(*rows))
    assert book.of_tenant("acme", wall_s=0).models == frozenset({"demo"})
    assert book.of_tenant("else", wall_s=0).models is None
    with pytest.raises(UnauthenticatedError):
        book.of_tenant("gone", wall_s=0)
