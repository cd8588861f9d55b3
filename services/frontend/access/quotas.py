"""Quotas of tenants. Pure; times are arguments.

Requests and tokens are token buckets that hold the limit of one minute and refill evenly. Before it starts a request reserves
its prompt and the most that it may generate; at its end it returns the unused rest. A reservation is never larger than the
bucket; a request that generates more is charged in full, the level goes below zero, and the next request waits.
"""

from dataclasses import dataclass

from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, OverloadedError
from services.frontend.access.caller import Caller, Quota

# kvmesh.rpc.http_status maps these reasons to 429 and other overloads to 503.
TENANTS_MAX = 10_000
"""Tenants with a quota in memory; each takes about 300 bytes."""
REQUESTS, TOKENS, CONCURRENCY = "requests_quota", "tokens_quota", "concurrency_quota"


class TokenBucket:
    """Token bucket: holds up to `per_minute` and refills as much per minute."""

    __slots__ = ("_at_s", "_level", "per_minute")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Returns the level; below zero after more was used than reserved."""
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._level

    def resize(self, per_minute: float, now_s: float) -> None:
        """Changes the size. The used amount stays the same."""
        used = self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self._level = per_minute - used

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the time until the bucket holds `amount`; 0 if it does."""
        return max(0.0, amount - self.level(now_s)) * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Takes an amount; a negative one is returned to the bucket."""
        self._level = min(self.per_minute, self._level - amount)


class TenantAccount:
    """Usage of one tenant."""

    __slots__ = ("in_flight", "requests", "seen_s", "tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.seen_s = 0.0


@dataclass(slots=True, eq=False)
class Permit:
    """Permission to run one request, until `Quotas.leave`."""

    account: TenantAccount
    reserved_tokens: float
    is_open: bool = True


class Quotas:
    """Accounts of all tenants. `share`: this process's part of every limit, if several frontends serve one mesh."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self.share = 1.0

    def enter(self, caller: Caller, *, prompt_tokens: int, output_tokens_max: int, now_s: float) -> Permit:
        """Reserves quota for a request. Raises OverloadedError with the time after which it would fit."""
        quota = caller.quota
        account = self._account(caller, now_s)
        if quota.concurrent_requests is not None:
            # At least one: many frontends would otherwise refuse every request of a small limit.
            limit = max(1, int(quota.concurrent_requests * self.share))
            if account.in_flight >= limit:
                message = f"{account.in_flight} requests are in flight, which is this key's limit"
                raise OverloadedError(message, reason=CONCURRENCY, retry_after_s=1.0)
        if account.requests is not None and (wait_s := account.requests.wait_s(1, now_s)):
            message = f"more than {quota.requests_per_minute} requests a minute"
            raise OverloadedError(message, reason=REQUESTS, retry_after_s=wait_s)
        reserved = _reserve_tokens(
            account.tokens, quota, prompt_tokens=prompt_tokens, output_tokens_max=output_tokens_max, now_s=now_s
        )
        # After everything that may refuse the request.
        if account.requests is not None:
            account.requests.take(1)
        account.in_flight += 1
        return Permit(account, reserved)

    def check_level(self, caller: Caller, *, now_s: float) -> None:
        """Raises OverloadedError while a quota is overdrawn."""
        account = self._account(caller, now_s)
        for bucket, reason, what in ((account.requests, REQUESTS, "requests"), (account.tokens, TOKENS, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(0, now_s)):
                message = f"more than {bucket.per_minute:g} {what} a minute, refused requests counted"
                raise OverloadedError(message, reason=reason, retry_after_s=wait_s)

    def charge(self, caller: Caller, *, requests: int, tokens: int, now_s: float) -> None:
        """Takes from the quotas, beyond zero if necessary, but at most a full bucket at a time."""
        account = self._account(caller, now_s)
        for bucket, amount in ((account.requests, requests), (account.tokens, tokens)):
            if bucket is not None and amount:
                bucket.level(now_s)
                bucket.take(min(amount, bucket.per_minute))

    def leave(self, permit: Permit, usage: Usage, *, now_s: float) -> None:
        """Ends a request and returns its unused reservation. Idempotent."""
        if not permit.is_open:
            return
        permit.is_open = False
        account = permit.account
        account.in_flight -= 1
        account.seen_s = now_s
        if account.tokens is not None:
            # Refills the bucket up to now, since `take` does not.
            account.tokens.level(now_s)
            account.tokens.take(usage.prompt_tokens + usage.output_tokens - permit.reserved_tokens)

    def _account(self, caller: Caller, now_s: float) -> TenantAccount:
        account = self._accounts.get(caller.tenant)
        if account is None:
            if len(self._accounts) >= TENANTS_MAX:
                self._remove_idle(now_s)
            account = self._accounts[caller.tenant] = TenantAccount()
        account.seen_s = now_s
        # Each time, because new keys or another number of frontends may have changed the limits.
        account.requests = self._bucket(account.requests, caller.quota.requests_per_minute, now_s)
        account.tokens = self._bucket(account.tokens, caller.quota.tokens_per_minute, now_s)
        return account

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
        if per_minute is None:
            return None
        size = max(1.0, per_minute * self.share)
        if bucket is None:
            return TokenBucket(per_minute=size, now_s=now_s)
        if bucket.per_minute != size:
            bucket.resize(size, now_s)
        return bucket

    def _remove_idle(self, now_s: float) -> None:
        """Removes tenants that were idle for a minute: their buckets are full again, so nothing is lost."""
        idle = [name for name, each in self._accounts.items() if not each.in_flight and now_s - each.seen_s >= 60]
        for name in idle:
            del self._accounts[name]
        if len(self._accounts) >= TENANTS_MAX:
            raise OverloadedError("too many tenants at a time", reason="tenants_full", retry_after_s=60.0)


def _reserve_tokens(
    bucket: TokenBucket | None, quota: Quota, *, prompt_tokens: int, output_tokens_max: int, now_s: float
) -> float:
    """Takes the request's tokens from the bucket and returns their number."""
    if bucket is None:
        return 0.0
    if prompt_tokens > bucket.per_minute:
        message = f"the prompt has {prompt_tokens} tokens, more than this key's {quota.tokens_per_minute} a minute"
        raise InvalidRequestError(message, reason="request_exceeds_quota")
    reserved = min(prompt_tokens + output_tokens_max, bucket.per_minute)
    if wait_s := bucket.wait_s(reserved, now_s):
        message = f"more than {quota.tokens_per_minute} tokens a minute, answers counted at their longest"
        raise OverloadedError(message, reason=TOKENS, retry_after_s=wait_s)
    bucket.take(reserved)
    return reserved
