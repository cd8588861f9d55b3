"""The service that each tenant received, as a virtual time per tenant that all subqueues of one model and priority share. Pure.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). A tenant's virtual time is the service that it received, divided
by its weight. The tenant with the smallest virtual time is served next. A tenant that had nothing waiting continues at the current
virtual time (that of the newest service), unless its own is later. So a tenant that asks for less than its share is served next, whatever
others have waiting, and one that asks for more waits for the others.

A tenant has one account however many subqueues its requests wait in, so requests of several kinds get no more than those of one kind.
Room that a subqueue cannot use says nothing about its tenants: a tenant continues at the present virtual time whenever its requests begin
to wait in one more subqueue, so it cannot save up service in a subqueue without room and spend it in another.

Invariants:
1. An account is among `accounts()` exactly while requests of its tenant wait.
2. There are at most `tenants_max` of them, those of tenants with a weight of their own, and one for all other tenants.
"""

from collections.abc import Collection, Iterable, Mapping

from kvmesh.errors import InvalidRequestError

OTHERS = "\x00others"
"""The account shared by all tenants beyond `tenants_max`. A tenant with this name shares it too."""
TENANTS_MAX = 256
"""Tenants with an account of their own per model and priority. A drain compares them all."""

WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0


def read_weights(entries: Iterable[str]) -> Mapping[str, float]:
    """Reads the setting `tenant_weights`: `tenant=weight` each. Raises InvalidRequestError."""
    weights: dict[str, float] = {}
    for entry in entries:
        tenant, separator, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not separator or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            message = f"{entry!r} is not tenant=weight with a weight of {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            raise InvalidRequestError(f"tenant_weights: {message}", field="tenant_weights")
        weights[tenant.strip()] = weight
    return weights


class Account:
    """The virtual time of one tenant."""

    __slots__ = ("joined", "subqueues", "tenant", "virtual_time", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.virtual_time = 0.0
        self.joined = 0
        """Breaks ties: the tenant that has waited longer goes first."""
        self.subqueues = 0
        """Subqueues in which requests of the tenant wait."""

    @property
    def rank(self) -> tuple[float, int]:
        """The tenant with the smallest rank is served next."""
        return self.virtual_time, self.joined

    def charge(self, tokens: float) -> None:
        """Charges the tenant; a negative number returns a part of an earlier charge."""
        self.virtual_time += tokens / self.weight


class Accounts:
    """The accounts of one model and priority."""

    def __init__(self, *, weights: Mapping[str, float], tenants_max: int = TENANTS_MAX) -> None:
        self._weights = weights
        self._tenants_max = tenants_max
        self._active: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}
        """Tenants with nothing waiting that were charged more than others were until now."""
        self._now = 0.0
        self._joined = 0

    def __bool__(self) -> bool:
        """Returns True while requests wait."""
        return bool(self._active)

    def accounts(self) -> Collection[Account]:
        return self._active.values()

    def of(self, tenant: str) -> Account:
        """Returns the account that the tenant's next request is charged to."""
        known = self._active.get(tenant)
        if known is not None:
            return known
        if len(self._active) >= self._tenants_max and tenant not in self._weights:
            tenant = OTHERS
            if (others := self._active.get(OTHERS)) is not None:
                return others
        return self._idle.get(tenant) or Account(tenant, self._weights.get(tenant, 1.0))

    def has_more_than_its_share(self, tenant: str) -> bool:
        """Returns whether the tenant was charged more than other tenants, whose requests wait."""
        account = self.of(tenant)
        # A tenant that waits alone takes nothing from others.
        is_alone = len(self._active) == 1 and account.subqueues > 0
        return not is_alone and account.virtual_time > self._now

    def join(self, account: Account) -> None:
        """A first request of the tenant waits in a subqueue."""
        if not account.subqueues:
            self._idle.pop(account.tenant, None)
            self._active[account.tenant] = account
        account.subqueues += 1
        self._joined += 1
        account.joined = self._joined
        account.virtual_time = max(self._now, account.virtual_time)

    def leave(self, account: Account) -> None:
        """No more requests of the tenant wait in a subqueue."""
        account.subqueues -= 1
        if not account.subqueues:
            del self._active[account.tenant]
            self._keep_idle(account)

    def serve(self, account: Account, tokens: float) -> None:
        """A request of a tenant was served: one that waited, or a new one while others wait."""
        if not account.subqueues:
            account.virtual_time = max(self._now, account.virtual_time)
        # Before the charge: in start-time fair queueing, the virtual time is the start of the newest service, not its end.
        self._now = max(self._now, account.virtual_time)
        self._joined += 1
        account.joined = self._joined
        account.charge(tokens)
        if not account.subqueues:
            self._keep_idle(account)

    def charge_waiting(self, tenant: str, tokens: float) -> None:
        """Charges a tenant whose requests wait here for what another router served to it.

        Does not charge other tenants, because none of their requests wait here.
        """
        account = self._active.get(tenant)
        if account is not None:
            account.charge(tokens)

    def _keep_idle(self, account: Account) -> None:
        self._idle[account.tenant] = account
        if len(self._idle) <= self._tenants_max:
            return
        # An account that is not ahead of the present time would continue at the present time, as a new one does.
        self._idle = {name: each for name, each in self._idle.items() if each.virtual_time > self._now}
        while len(self._idle) > self._tenants_max:
            # The one that loses least: it is hardly ahead of the others.
            del self._idle[min(self._idle.values(), key=lambda each: each.rank).tenant]
