"""What tenants may use, counted. Pure; times are arguments.

Requests and tokens are token buckets: a minute's worth at most, refilled evenly. A request reserves its prompt and the most it
may generate before it starts, and gets back in the end what it did not use. What was generated is charged even where the
reservation was smaller (it is never larger than the bucket): the bucket then goes below zero and the next request waits.
"""

from dataclasses import dataclass

from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, OverloadedError
from services.frontend.access.caller import Caller, Quota

# kvmesh.rpc.http_status knows these words: they are answered with 429, other overloads with 503.
REQUESTS, TOKENS, CONCURRENCY = "requests_quota", "tokens_quota", "concurrency_quota"


class Bucket:
    """A bucket that holds up to `per_minute` and gains as much a minute."""

    __slots__ = ("_at_s", "_level", "per_minute")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is left; below zero after more was used than reserved."""
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._level

    def resize(self, per_minute: float, now_s: float) -> None:
        """Another size from now on; what was used stays used."""
        used = self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self._level = per_minute - used

    def wait_s(self, amount: float, now_s: float) -> float:
        """Time until it holds `amount`; 0: it does."""
        return max(0.0, amount - self.level(now_s)) * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Takes; a negative amount gives back."""
        self._level = min(self.per_minute, self._level - amount)


class Account:
    """One tenant's use."""

    __slots__ = ("in_flight", "requests", "seen_s", "tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.seen_s = 0.0


@dataclass(slots=True, eq=False)
class Permit:
    """Leave to run one request; `Quotas.leave` ends it, once."""

    account: Account
    reserved_tokens: float
    is_open: bool = True


class Quotas:
    """All tenants' accounts. `share` is this process's part of every limit, where several frontends serve one mesh."""

    def __init__(self, *, tenants_max: int) -> None:
        self._accounts: dict[str, Account] = {}
        self._tenants_max = tenants_max
        self.share = 1.0

    def enter(self, caller: Caller, *, prompt_tokens: int, output_tokens_max: int, now_s: float) -> Permit:
        """Reserves for a request. Raises OverloadedError with the time after which it would fit."""
        quota = caller.quota
        account = self._account(caller, now_s)
        if quota.concurrent_requests is not None:
            limit = max(1, int(quota.concurrent_requests * self.share))
            if account.in_flight >= limit:
                message = f"{account.in_flight} requests are in flight, which is this key's limit"
                raise OverloadedError(message, reason=CONCURRENCY, retry_after_s=1.0)
        if account.requests is not None and (wait_s := account.requests.wait_s(1, now_s)):
            message = f"more than {quota.requests_per_minute} requests a minute"
            raise OverloadedError(message, reason=REQUESTS, retry_after_s=wait_s)
        reserved = self._reserve_tokens(account, quota, prompt_tokens, output_tokens_max, now_s)
        if account.requests is not None:
            account.requests.take(1)
        account.in_flight += 1
        return Permit(account, reserved)

    def leave(self, permit: Permit, usage: Usage, *, now_s: float) -> None:
        """The request is over: what it did not use goes back. Idempotent."""
        if not permit.is_open:
            return
        permit.is_open = False
        account = permit.account
        account.in_flight -= 1
        account.seen_s = now_s
        if account.tokens is not None:
            account.tokens.level(now_s)
            account.tokens.take(usage.prompt_tokens + usage.output_tokens - permit.reserved_tokens)

    def _reserve_tokens(
        self, account: Account, quota: Quota, prompt_tokens: int, output_tokens_max: int, now_s: float
    ) -> float:
        bucket = account.tokens
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

    def _account(self, caller: Caller, now_s: float) -> Account:
        account = self._accounts.get(caller.tenant)
        if account is None:
            if len(self._accounts) >= self._tenants_max:
                self._forget_idle(now_s)
            account = self._accounts[caller.tenant] = Account()
        account.seen_s = now_s
        account.requests = self._bucket(account.requests, caller.quota.requests_per_minute, now_s)
        account.tokens = self._bucket(account.tokens, caller.quota.tokens_per_minute, now_s)
        return account

    def _bucket(self, bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
        if per_minute is None:
            return None
        size = max(1.0, per_minute * self.share)
        if bucket is None:
            return Bucket(size, now_s)
        if bucket.per_minute != size:
            bucket.resize(size, now_s)
        return bucket

    def _forget_idle(self, now_s: float) -> None:
        """A tenant idle for a minute has full buckets again: forgetting it changes nothing."""
        idle = [name for name, each in self._accounts.items() if not each.in_flight and now_s - each.seen_s >= 60]
        for name in idle:
            del self._accounts[name]
        if len(self._accounts) >= self._tenants_max:
            raise OverloadedError("too many tenants at a time", reason="tenants_full", retry_after_s=60.0)
