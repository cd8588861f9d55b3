"""Settings of the SGLang engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.settings import setting

CPU_KV_CACHE_BYTES = 128 << 20
CPU_RUNNING_REQUESTS = 64
TRANSFER_BACKENDS = ("nixl", "mooncake", "mooncake_tcp", "fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Settings of one SGLang engine. 0 or empty means SGLang's or the model's value unless a field says otherwise.

    `model` is a directory or a hub name. `served_name` is the name in the mesh; empty: `model`. `role` is `prefill` or `decode`. A prefill
    engine's bootstrap server listens on `bootstrap_host`, to which decode engines connect.
    In a handoff a prefill engine waits at most `pull_timeout_s` for the decode engine, and that one at most `lease_s` for the KV. SGLang
    itself waits for five minutes.
    """

    model: str
    served_name: str = ""
    role: str = "decode"
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    bootstrap_host: str = "127.0.0.1"
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
        0.85, "Share of a GPU's memory for weights and KV. Not used on CPU.", min=0.01, max=1
    )
    first_gpu: int = setting(0, "First GPU of this engine; its ranks take the next ones.", min=0)
    tensor_parallel_size: int = setting(1, "Ranks, each a process.", min=1)
    data_parallel_size: int = setting(
        1,
        "Data-parallel ranks of a worker: engines with a cache and a queue of their own, each on the GPUs after those of the one before.",
        min=1,
        max=64,
    )
    context_tokens_max: int = setting(0, "Context length; 0: the model's.", min=0)
    running_requests_max: int = setting(0, "Requests that run at once; 0: 64 on CPU, SGLang's default on a GPU.", min=0)
    waiting_requests_max: int = setting(1024, "Requests that wait; more are refused as overloaded.", min=1)
    chunk_tokens: int = setting(
        0,
        "Prompt tokens of a step; longer prompts are computed in parts. 0: 512 on CPU, SGLang's default on a GPU.",
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

    @property
    def mode(self) -> str:
        """SGLang's disaggregation mode."""
        return self.role if self.has_kv_transfer else "null"
