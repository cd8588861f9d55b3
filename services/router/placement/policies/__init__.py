"""How candidates are weighed: one class per file, found by the table below or by an entry point of another package."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from kvmesh.errors import InvalidRequestError
from services.router.placement.policies.base import Candidates, Columns, LegKind, Policy, PolicyContext
from services.router.placement.policies.consistent_hash import ConsistentHashPolicy
from services.router.placement.policies.kv import KvPolicy
from services.router.placement.policies.least_loaded import LeastLoadedPolicy
from services.router.placement.policies.pinned import PinnedPolicy
from services.router.placement.policies.power_of_two import PowerOfTwoPolicy
from services.router.placement.policies.random_choice import RandomPolicy
from services.router.placement.policies.round_robin import RoundRobinPolicy

__all__ = ["GROUP", "POLICIES", "Candidates", "Columns", "LegKind", "Policy", "PolicyContext", "make_policy"]

GROUP = "kvmesh.router_policies"
"""Entry points: name = package.module:Class, a subclass of Policy."""

POLICIES: Mapping[str, type[Policy]] = {
    "kv": KvPolicy,
    "round_robin": RoundRobinPolicy,
    "random": RandomPolicy,
    "least_loaded": LeastLoadedPolicy,
    "power_of_two": PowerOfTwoPolicy,
    "consistent_hash": ConsistentHashPolicy,
    "pinned": PinnedPolicy,
}


def make_policy(name: str | type[Policy], context: PolicyContext) -> Policy:
    """The policy of that name, or of that class. InvalidRequestError names what there is."""
    made = (POLICIES.get(name) or _from_entry_point(name)) if isinstance(name, str) else name
    if not (isinstance(made, type) and issubclass(made, Policy)):
        raise InvalidRequestError(f"the policy {name!r} is not a subclass of Policy", field="policy")
    return made(context)


def _from_entry_point(name: str) -> object:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({*POLICIES, *found}))
        raise InvalidRequestError(f"no policy is named {name!r}; there are {known}", field="policy")
    return found[name].load()
