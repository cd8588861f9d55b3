"""Labels of a worker, from its settings through the registry to the router."""

from dataclasses import replace

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import DECODE
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.settings import WorkerSettings
from services.router.serving.membership import labels_of
from tests.worker_rig import SLOW, WORKER, make_worker


async def test_a_label_arrives_at_the_router() -> None:
    """The router reads the configured labels from the registered instance."""
    rig = make_worker(SLOW, replace(WORKER, labels=("zone=a", "rack=r-1.x")))
    agent = MemoryAgent()
    membership = WorkerMembership(rig.worker, agent.registry(), host="w", uses_tls=False, clock=SystemClock())
    membership.set_ports(port=1, metrics_port=2)
    await rig.worker.start()
    try:
        await membership.start()
        (instance,) = (await agent.registry().instances(DECODE)).instances
        assert labels_of(instance) == {"zone": "a", "rack": "r-1.x"}
    finally:
        await membership.aclose()
        await rig.worker.aclose()


@pytest.mark.parametrize("label", ["zone", "=a", "zone=", "a b=c", "zone=a=b", "x" * 65 + "=a"])
def test_an_invalid_label_is_refused(label: str) -> None:
    """Such a label is not valid as a registry key, or a request could not name it."""
    with pytest.raises(ValueError, match="labels"):
        WorkerSettings(labels=(label,))
