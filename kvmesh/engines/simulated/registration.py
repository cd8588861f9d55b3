"""The simulated engine's registration.

`kvmesh up` imports it before it forks services, so nothing here imports numpy at the top: its threads would forbid that.
"""

from dataclasses import replace

from kvmesh.core import Capabilities, Handoff
from kvmesh.engines.base import Engine
from kvmesh.engines.ranked import RankedEngine, with_ranks
from kvmesh.engines.registration import EngineHost, EngineRegistration, free_port
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.kv.paths import KvPaths


def make(settings: SimulatedSettings, host: EngineHost) -> Engine:
    settings = replace(
        settings,
        model=host.served_name,
        model_dir=host.model,
        role=host.role.value,
        waiting_requests_max=host.requests_max,
        lease_s=host.kv.lease_s,
        pull_timeout_s=host.kv.pull_timeout_s,
    )
    paths = KvPaths(pull_timeout_s=settings.pull_timeout_s)
    engines = [make_rank(settings, host, paths, rank=rank) for rank in range(settings.data_parallel_size)]
    return engines[0] if len(engines) == 1 else RankedEngine(engines, paths)


def make_rank(settings: SimulatedSettings, host: EngineHost, paths: KvPaths, *, rank: int) -> Engine:
    from kvmesh.engines.simulated.engine import SimulatedEngine

    settings = replace(settings, data_parallel_rank=rank)
    if settings.kv_transport != "nixl":
        return SimulatedEngine(settings, host.clock, paths=paths)
    from kvmesh.engines.simulated.slow_transport import SlowTransport
    from kvmesh.kv.nixl_transport import NixlTransport
    from kvmesh.kv.transport import KvTransport

    transport: KvTransport = NixlTransport()
    if settings.kv_transfer_pause_s:
        transport = SlowTransport(transport, host.clock, settings.kv_transfer_pause_s)
    if settings.handoff != Handoff.RENDEZVOUS:
        return SimulatedEngine(settings, host.clock, transport, paths=paths)
    from kvmesh.engines.simulated.rendezvous.wire import HttpWire

    wire = HttpWire(host.address, free_port(host))
    # Every request needs the transport, so there is nothing to serve before it has started.
    settings = replace(settings, kv_transport_delay_s=0.0)
    return SimulatedEngine(settings, host.clock, transport, wire=wire, paths=paths)


def all_capabilities() -> Capabilities:
    """Returns the capabilities of an engine with a tokenizer and a KV transport."""
    from kvmesh.engines.simulated.engine import capabilities

    return with_ranks(capabilities(has_transport=True, can_write=True))


SIMULATED = EngineRegistration(
    name="simulated",
    title="simulated",
    settings_type=SimulatedSettings,
    make_settings=lambda: SimulatedSettings(kv_transport_delay_s=1.0, eos_after_tokens=64),
    set_by_host=(
        "model",
        "model_dir",
        "role",
        "waiting_requests_max",
        "lease_s",
        "pull_timeout_s",
        "data_parallel_rank",
    ),
    make=make,
    capabilities=all_capabilities,
    # NIXL takes a second to load. Decode workers compute prompts until prefill workers are registered.
    prefill_joins_late=True,
    unsupported={"multi_rank": "a step has no work to share", "multi_node": "a step has no work to share"},
)
