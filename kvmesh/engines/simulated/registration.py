"""The simulated engine's registration."""

from dataclasses import replace

from kvmesh.core import Capabilities, Handoff
from kvmesh.engines.base import Engine
from kvmesh.engines.registration import EngineHost, EngineRegistration
from kvmesh.engines.simulated.settings import SimulatedSettings


def make(settings: SimulatedSettings, host: EngineHost) -> Engine:
    from kvmesh.engines.simulated.engine import SimulatedEngine

    settings = replace(
        settings,
        model=host.served_name,
        model_dir=host.model,
        role=host.role.value,
        lease_s=host.kv.lease_s,
        pull_timeout_s=host.kv.pull_timeout_s,
    )
    if settings.kv_transport != "nixl":
        return SimulatedEngine(settings, host.clock)
    from kvmesh.kv.nixl_transport import NixlTransport

    if settings.handoff != Handoff.RENDEZVOUS:
        return SimulatedEngine(settings, host.clock, NixlTransport())
    from kvmesh.engines.simulated.rendezvous.http_wire import HttpWire

    port = settings.bootstrap_port
    if not port and host.ports is not None:
        port = host.ports.claim(host.address)
    wire = HttpWire(host.address, port)
    # Every request needs the transport, so there is nothing to serve before it has started.
    return SimulatedEngine(replace(settings, kv_transport_delay_s=0.0), host.clock, NixlTransport(), wire=wire)


def all_capabilities() -> Capabilities:
    """The capabilities of an engine with a tokenizer and a KV transport."""
    from kvmesh.engines.simulated.engine import capabilities

    return capabilities(has_transport=True, can_write=True)


SIMULATED = EngineRegistration(
    name="simulated",
    title="simulated",
    settings_type=SimulatedSettings,
    make_settings=lambda: SimulatedSettings(kv_transport_delay_s=1.0, eos_after_tokens=64),
    set_by_host=("model", "model_dir", "role", "lease_s", "pull_timeout_s"),
    make=make,
    capabilities=all_capabilities,
    # NIXL takes a second to load. Decode workers compute prompts until prefill workers are registered.
    prefill_joins_late=True,
)
