"""SGLang's registration."""

from dataclasses import replace

from kvmesh.core import Capabilities
from kvmesh.engines.base import Engine
from kvmesh.engines.ranked import RankedEngine, with_ranks
from kvmesh.engines.registration import EngineHost, EngineRegistration, rank_port, with_features
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.kv.paths import KvPaths


def make(settings: SglangSettings, host: EngineHost) -> Engine:
    settings = replace(
        settings,
        model=host.model,
        served_name=host.served_name,
        role=host.role.value,
        lease_s=host.kv.lease_s,
        pull_timeout_s=host.kv.pull_timeout_s,
        bootstrap_host=host.address,
    )
    engines = [make_rank(settings, host, rank) for rank in range(settings.data_parallel_size)]
    # Both engines of a rendezvous report its failure, so no paths are recorded.
    return engines[0] if len(engines) == 1 else RankedEngine(engines, KvPaths(pull_timeout_s=settings.pull_timeout_s))


def make_rank(settings: SglangSettings, host: EngineHost, rank: int) -> Engine:
    from kvmesh.engines.sglang.engine import SglangEngine

    port = rank_port(settings.bootstrap_port, rank, host) if settings.mode == "prefill" else settings.bootstrap_port
    first_gpu = settings.first_gpu + rank * settings.tensor_parallel_size
    return SglangEngine(replace(settings, bootstrap_port=port, first_gpu=first_gpu))


def all_capabilities() -> Capabilities:
    """The capabilities of a generating and of an embedding model together, with adapters, a tokenizer and several ranks."""
    from kvmesh.engines.sglang.description import VERSION, capabilities

    settings = SglangSettings(model="any", enable_lora=True)
    alone = replace(settings, has_kv_transfer=False)
    records = [
        capabilities(each, version=VERSION, has_tokenizer=True, honors_seeds=True, is_embedding=is_embedding)
        for each, is_embedding in ((settings, False), (alone, False), (alone, True))
    ]
    names = dict.fromkeys(name for each in records for name in each.features)
    return with_features(with_ranks(replace(records[0], features=tuple(names))), "multi_rank")


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
