"""Shapes of simulated meshes, by name."""

from kvmesh.rpc.router.settings import RouterLinkSettings
from services.router.core_settings import SyncSettings
from services.router.settings import RouterSettings
from services.simulation.mesh import MeshShape, default_engine

MESHES = {
    "small": MeshShape(),
    "tight": MeshShape(engine=default_engine(kv_blocks=130, running_requests_max=16, step_tokens_max=128, lease_s=2.0)),
    "two-routers": MeshShape(routers=2),
    "two-quick-routers": MeshShape(routers=2, router=RouterSettings(sync=SyncSettings(interval_s=0.01))),
    "four-routers": MeshShape(routers=4, link=RouterLinkSettings(move_pause_s=0.2, leave_s=0.5, shun_s=1.0)),
    "no-prefill": MeshShape(prefill=0),
    "crowded": MeshShape(router=RouterSettings(requests_per_decode_max=8, prompt_tokens_per_prefill_max=1024)),
    "crowded-two-routers": MeshShape(routers=2, router=RouterSettings(requests_per_decode_max=4)),
    "three-and-three": MeshShape(
        prefill=3, decode=3, routers=2, engine=default_engine(kv_blocks=4000, eos_after_tokens=400)
    ),
    "rendezvous": MeshShape(engine=default_engine(handoff="rendezvous")),
    "rendezvous-tight": MeshShape(
        engine=default_engine(
            handoff="rendezvous",
            kv_blocks=130,
            running_requests_max=16,
            step_tokens_max=128,
            reserved_output_tokens=16,
            eos_after_tokens=120,
        )
    ),
    "rendezvous-three-and-three": MeshShape(
        prefill=3,
        decode=3,
        routers=2,
        engine=default_engine(handoff="rendezvous", kv_blocks=4000, eos_after_tokens=400),
    ),
    "three-tokens": MeshShape(engine=default_engine(decode_tokens_per_step=3)),
}
"""The command line accepts these names, so that every run can be replayed."""
