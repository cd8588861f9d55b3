"""SGLang's registration."""

from dataclasses import replace

from kvmesh.core import Capabilities, Role
from kvmesh.engines.base import Engine
from kvmesh.engines.registration import EngineHost, EngineRegistration
from kvmesh.engines.sglang.settings import SglangSettings


def make(settings: SglangSettings, host: EngineHost) -> Engine:
    from kvmesh.engines.sglang.engine import SglangEngine

    port = settings.bootstrap_port
    if not port and host.role is Role.PREFILL and settings.has_kv_transfer and host.ports is not None:
        port = host.ports.claim(host.address)
    return SglangEngine(
        replace(
            settings,
            model=host.model,
            served_name=host.served_name,
            role=host.role.value,
            lease_s=host.kv.lease_s,
            pull_timeout_s=host.kv.pull_timeout_s,
            bootstrap_host=host.address,
            bootstrap_port=port,
        )
    )


def all_capabilities() -> Capabilities:
    """The capabilities of a generating and of an embedding model together, with adapters and a tokenizer."""
    from kvmesh.engines.sglang.description import VERSION, capabilities

    settings = SglangSettings(model="any", enable_lora=True)
    alone = replace(settings, has_kv_transfer=False)
    records = [
        capabilities(each, version=VERSION, has_tokenizer=True, honors_seeds=True, is_embedding=is_embedding)
        for each, is_embedding in ((settings, False), (alone, False), (alone, True))
    ]
    return replace(records[0], features=tuple(dict.fromkeys(name for each in records for name in each.features)))


SGLANG = EngineRegistration(
    name="sglang",
    title="SGLang",
    settings_type=SglangSettings,
    make_settings=lambda: SglangSettings(model="set by the host"),
    set_by_host=("model", "served_name", "role", "lease_s", "pull_timeout_s", "bootstrap_host"),
    make=make,
    capabilities=all_capabilities,
    unsupported={
        "sleep": "this engine cannot here",
        "handoff:sequential": "a failed handoff places the request again",
        "roles:2": "its role is fixed at its start",
        "continued_penalties": "it counts emitted tokens as prompt; refused",
        "continued_structured_output": "its grammar begins with the leg; refused",
    },
    start_timeout_s=lambda settings: settings.start_timeout_s,
    flags_without_prefill=("--no-sglang-has-kv-transfer",),
)
