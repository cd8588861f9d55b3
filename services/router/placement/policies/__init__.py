"""Placement policies, found by name: those of this folder, and entry points of other packages."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from kvmesh.errors import InvalidRequestError
from services.router.placement.policies.base import Candidates, LegKind, Policy, PolicyContext, Terms
from services.router.placement.policies.kv import KvPolicy
from services.router.placement.policies.simple import (
    ConsistentHashPolicy,
    LeastLoadedPolicy,
    PinnedPolicy,
    PowerOfTwoPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)

__all__ = ["GROUP", "POLICIES", "Candidates", "LegKind", "Policy", "PolicyContext", "Terms", "make_policy"]

GROUP = "kvmesh.router_policies"
"""Entry-point group; name = package.module:Class, a subclass of Policy."""

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        KvPolicy,
        RoundRobinPolicy,
        RandomPolicy,
        LeastLoadedPolicy,
        PowerOfTwoPolicy,
        ConsistentHashPolicy,
        PinnedPolicy,
    )
}


def make_policy(name: str | type[Policy], context: PolicyContext) -> Policy:
    """Makes the policy with that name, or of that class. Raises InvalidRequestError with the known names."""
    found = (POLICIES.get(name) or _load_entry_point(name)) if isinstance(name, str) else name
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InvalidRequestError(f"the policy {name!r} is not a subclass of Policy", field="policy")
    return found(context)


def _load_entry_point(name: str) -> object:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({*POLICIES, *found}))
        raise InvalidRequestError(f"no policy is named {name!r}; known policies: {known}", field="policy")
    return found[name].load()
