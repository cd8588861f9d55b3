"""The settings of a simulated mesh from its topology.

Leases are longer than a whole run, so that what a lease would heal later is seen as a leak. Pauses of breakers and graces are short, so that
a run needs little time to settle.
"""

from services.frontend.settings import PipelineSettings
from services.router.health.breaker import BreakerSettings
from services.router.settings import RouterSettings
from services.simulation.draw import ADAPTERS
from services.simulation.mesh import MeshShape, default_engine
from services.simulation.schedule import Topology

LEASE_S = 60.0
CANDIDATES = 2
BREAKER = BreakerSettings(pause_min_s=0.5, pause_max_s=3.0)


def shape_of(topology: Topology) -> MeshShape:
    """The mesh of a schedule."""
    tight = (
        {"kv_blocks": 130, "running_requests_max": 16, "step_tokens_max": 128, "reserved_output_tokens": 16}
        if topology.is_tight
        else {}
    )
    router = (
        RouterSettings(
            requests_per_decode_max=6, prompt_tokens_per_prefill_max=1024, breaker=BREAKER, reservation_grace_s=3.0
        )
        if topology.is_crowded
        else RouterSettings(breaker=BREAKER, reservation_grace_s=3.0)
    )
    return MeshShape(
        prefill=topology.prefill,
        decode=topology.decode,
        routers=topology.routers,
        frontends=topology.frontends,
        candidates=CANDIDATES,
        kv_groups=topology.kv_groups,
        adapters=ADAPTERS,
        engine=default_engine(
            handoff="rendezvous" if topology.rendezvous else "sequential",
            decode_tokens_per_step=topology.decode_tokens_per_step,
            eos_after_tokens=max(2, topology.output_tokens_max // 2),
            lease_s=LEASE_S,
            pull_timeout_s=3.0,
            **tight,
        ),
        router=router,
        pipeline=PipelineSettings(first_token_timeout_s=60.0, idle_timeout_s=20.0),
    )
