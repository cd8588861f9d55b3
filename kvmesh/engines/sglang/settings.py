"""Settings of the SGLang engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engines.nodes import check_nodes, node_rank_setting, nodes_address_setting, nodes_setting
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import setting

CPU_KV_CACHE_BYTES = 128 << 20
CPU_RUNNING_REQUESTS = 64
GPU_MEMORY_FRACTION = 0.85
TRANSFER_BACKENDS = ("nixl", "mooncake", "mooncake_tcp", "fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Settings of one SGLang engine. 0 or empty means SGLang's or the model's value unless a field says otherwise.

    `model` is a directory or a hub name. `served_name` is the name in the mesh; empty: `model`. `role` is `prefill` or `decode`. A
    prefill engine's bootstrap server listens on `bootstrap_host`, to which decode engines connect. `secret_file` has the mesh's secret.
    In a handoff a prefill engine waits at most `pull_timeout_s` for the decode engine, and the decode engine at most `lease_s` for the
    KV. SGLang itself waits for five minutes.
    """

    model: str
    served_name: str = ""
    role: str = "decode"
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    bootstrap_host: str = "127.0.0.1"
    secret_file: str = ""
    revision: str = setting("", "Model revision, part of the compatibility hash.")
    python: str = setting(
        "",
        "Python that has SGLang; empty: that of the virtual environment beside kvmesh's, with `-sglang` at the end of its name, or"
        " kvmesh's own.",
    )
    has_kv_transfer: bool = setting(
        True,
        "False starts a decode worker that computes every prompt itself. True: it takes prompts from prefill workers only, since an"
        " SGLang engine in decode mode cannot compute them.",
    )
    can_switch_role: bool = setting(
        False,
        "Starts the engine so that its worker can move between the prefill and the decode pool. Needs the transfer backend `nixl`.",
    )
    transfer_backend: str = setting(
        "nixl",
        "How KV gets from prefill to decode workers. `fake` moves nothing and serves no clients; SGLang has it for decode workers only.",
        choices=TRANSFER_BACKENDS,
    )
    bootstrap_port: int = setting(0, "Port of the bootstrap server; 0: a free one.", min=0, max=65535)
    is_embedding: bool = setting(False, "Computes embeddings instead of generating tokens.")
    dtype: str = setting("auto", "Type of weights and activations.")
    block_size_tokens: int = setting(16, "Tokens per KV block: SGLang's page size.", min=1)
    kv_cache_bytes: int = setting(
        0, "KV memory; 0: 128 MiB on CPU, what is left of `gpu_memory_fraction` on a GPU.", min=0
    )
    gpu_memory_fraction: float = setting(
        GPU_MEMORY_FRACTION, "Share of a GPU's memory for weights and KV. Not used on CPU.", min=0.01, max=1
    )
    device_ids: tuple[str, ...] = setting(
        (), "GPUs of this worker, one for each rank: positions among the visible devices. Empty: the first ones."
    )
    tensor_parallel_size: int = setting(1, "Ranks, each a process.", min=1)
    data_parallel_size: int = setting(
        1,
        "Data-parallel ranks of a worker: engines with a cache and a queue of their own, each on the GPUs after those of the one before.",
        min=1,
        max=64,
    )
    nodes: int = nodes_setting()
    node_rank: int = node_rank_setting()
    nodes_address: str = nodes_address_setting()
    context_tokens_max: int = setting(0, "Context length; 0: the model's.", min=0)
    running_requests_max: int = setting(0, "Requests that run at once; 0: 64 on CPU, SGLang's default on a GPU.", min=0)
    waiting_requests_max: int = 1024
    chunk_tokens: int = setting(
        0,
        "Prompt tokens of a step; longer prompts are computed in parts. 0: 256 on CPU, SGLang's default on a GPU.",
        min=0,
    )
    honors_seeds: bool | None = setting(
        None,
        "Honours the seeds of requests, with SGLang's deterministic inference, and then refuses `min_p`. Empty: true on CPU; false on a"
        " GPU, where it is slower.",
    )
    tokenizer: str = setting(
        "auto",
        "`load`: SGLang reads the tokenizer, which structured output and `min_tokens` need; `skip`: it does not; `auto`: if the"
        " directory has one.",
        choices=("auto", "load", "skip"),
    )
    enable_lora: bool = setting(False, "Allows LoRA adapters.")
    adapters_max: int = setting(8, "Adapters that may be loaded.", min=1)
    adapters_running_max: int = setting(4, "Adapters in one batch.", min=1)
    adapter_rank_max: int = setting(16, "Largest LoRA rank.", min=1)
    start_timeout_s: float = setting(7200.0, "Longest start, a download of the model included.", min=1)
    log_level: str = setting("warning", "SGLang's log level.")
    engine_arguments: Mapping[str, Any] = setting(
        {},
        "Further ServerArgs of SGLang by name; they override the values above. Those that kvmesh sets itself are refused.",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequestError("model must be given", field="model")
        if not 0 < self.pull_timeout_s < self.lease_s:
            raise InvalidRequestError("pull_timeout_s must be above 0 and below lease_s", field="pull_timeout_s")
        if self.can_switch_role and not (self.has_kv_transfer and self.transfer_backend == "nixl"):
            raise InvalidRequestError(
                "can_switch_role needs has_kv_transfer and the transfer backend nixl", field="can_switch_role"
            )
        if not all(each.isdecimal() for each in self.device_ids):
            raise InvalidRequestError("device_ids are positions, such as 0,1", field="device_ids")
        if self.nodes > 1:
            self._check_nodes()

    def _check_nodes(self) -> None:
        check_nodes(
            nodes=self.nodes,
            node_rank=self.node_rank,
            nodes_address=self.nodes_address,
            ranks=self.tensor_parallel_size,
        )
        if self.data_parallel_size > 1:
            raise InvalidRequestError(
                "data_parallel_size must be 1 with several nodes: start a worker for each", field="data_parallel_size"
            )
        if "prefill" in self.modes and not self.bootstrap_port:
            raise InvalidRequestError(
                "bootstrap_port must be given with several nodes, since each of them registers there",
                field="bootstrap_port",
            )

    @property
    def mode(self) -> str:
        """SGLang's disaggregation mode."""
        return self.role if self.has_kv_transfer else "null"

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the engine can have, its first one included."""
        return ("prefill", "decode") if self.can_switch_role else (self.mode,)

    def device_of(self, rank: int) -> int:
        """Returns the GPU of a rank of this machine, counted from 0."""
        return int(self.device_ids[rank]) if self.device_ids else rank

    @property
    def ranks_here(self) -> range:
        """The tensor-parallel ranks of this machine."""
        count = self.tensor_parallel_size // self.nodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)
