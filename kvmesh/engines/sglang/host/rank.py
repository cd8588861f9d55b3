"""One rank of an SGLang engine in this process: SGLang's configuration, its scheduler, and rank 0's bootstrap server."""

import gc
import importlib
import os
from typing import Any

from kvmesh.engines.sglang.host import cpu
from kvmesh.engines.sglang.host.environment import bind_ranks, set_defaults, uses_cpu
from kvmesh.engines.sglang.host.link import HostSocket
from kvmesh.engines.sglang.messages import Ready
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.kv.nixl_api import SELECTING_MODULE, set_progress_delay
from kvmesh.network.ports import free_port

PROGRESS_DELAY_US = 1_000
"""Longest sleep of NIXL's progress thread. At NIXL's default of 0 it uses a whole core per engine."""


class Rank:
    """SGLang's globals allow one rank in a process. `distributed_port` 0: a free one."""

    def __init__(self, settings: SglangSettings, *, number: int, distributed_port: int) -> None:
        set_defaults(settings)
        self._settings = settings
        self._number = number
        self._is_cpu = uses_cpu()
        if self._is_cpu:
            cpu.prepare()
            bind_ranks(settings)
        self.distributed_port = distributed_port or free_port("127.0.0.1", 0, listener="SGLang")
        self.bootstrap_port = self._free_bootstrap_port() if self._is_met else 0
        self._configure()

    def _free_bootstrap_port(self) -> int:
        settings = self._settings
        return free_port(
            settings.bootstrap_host, settings.bootstrap_port, listener="SGLang", taken=self.distributed_port
        )

    @property
    def _is_met(self) -> bool:
        """Whether this rank has the bootstrap server."""
        return self._number == 0 and "prefill" in self._settings.modes

    @property
    def _honors_seeds(self) -> bool:
        return self._is_cpu if self._settings.honors_seeds is None else self._settings.honors_seeds

    def _configure(self) -> None:
        """Configures the process as SGLang's own launcher does before it starts a scheduler."""
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.utils import configure_logger

        from kvmesh.engines.sglang.host.arguments import server_arguments

        port = self.bootstrap_port or self._settings.bootstrap_port or 8998
        self._arguments = server_arguments(self._settings, is_cpu=self._is_cpu, bootstrap_port=port)
        configure_logger(self._arguments)
        self._arguments.resolve_once()
        if not self._is_cpu:
            from sglang.srt.entrypoints.engine import _set_envs_and_config

            _set_envs_and_config(self._arguments)
        load_plugins()
        self._arguments.check_server_args()
        publish(self._arguments, role="scheduler", ranks=self._placement())

    def _placement(self) -> Any:
        from sglang.srt.managers.scheduler import SpawnRanks, spawn_world_rank

        self._gpu = self._settings.device_of(self._number - self._settings.ranks_here[0])
        world_rank = spawn_world_rank(self._arguments, tp_rank=self._number, pp_rank=0)
        return SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=self._gpu)

    def start(self, link: HostSocket | None) -> None:
        """Loads the model. A prefill engine registers with its bootstrap server during this, so that server must already listen."""
        from sglang.srt.server_args import PortArgs

        from kvmesh.engines.sglang.host.patches import honor_seeds, limit_waits, restrict_store
        from kvmesh.engines.sglang.host.scheduler import MeshScheduler

        if self._is_cpu:
            cpu.prepare_transfers()
        if self._settings.mode != "null" and self._settings.transfer_backend == "nixl":
            set_progress_delay(importlib.import_module(SELECTING_MODULE), PROGRESS_DELAY_US)
        if self._honors_seeds:
            honor_seeds(is_cpu=self._is_cpu)
        limit_waits()
        restrict_store()
        self._bootstrap = self._start_bootstrap() if self._is_met else None
        # Names of sockets that are not made.
        ports = PortArgs(
            tokenizer_ipc_name="",
            scheduler_input_ipc_name="",
            detokenizer_ipc_name="",
            nccl_port=self.distributed_port,
            rpc_ipc_name="",
            metrics_ipc_name="",
            tokenizer_worker_ipc_name=None,
            decoupled_spec_ipc_config=None,
            instance_id=f"kvmesh-{os.getpid()}",
        )
        self._scheduler = MeshScheduler(self._arguments, ports, link)
        # A full collection scans 0.76 million objects of torch and SGLang otherwise: 0.6 s between two steps. SGLang's own server freezes
        # them too.
        gc.collect()
        gc.freeze()

    def _start_bootstrap(self) -> Any:
        from sglang.srt.managers.disagg_service import start_disagg_service

        return start_disagg_service()

    def run(self) -> None:
        """Serves until the process ends."""
        self._scheduler.run_event_loop()

    def describe(self) -> Ready:
        """Returns the running engine."""
        from sglang.version import __version__

        from kvmesh.engines.sglang.host.factors import compatibility_factors

        scheduler, model = self._scheduler, self._scheduler.model_config
        page, tokens = scheduler.page_size, scheduler.max_total_num_tokens
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        return Ready(
            version=__version__,
            is_cpu=self._is_cpu,
            context_tokens_max=min(int(model.context_len), int(scheduler.max_req_input_len)),
            vocabulary_size=int(model.vocab_size),
            eos_token_ids=sorted(model.hf_eos_token_id or ()),
            sampling_defaults=model.get_default_sampling_params(),
            block_size_tokens=int(page),
            kv_blocks_total=int(tokens // page),
            kv_bytes_per_token=int(sum(pool.get_kv_size_bytes())) // max(1, int(pool.size)),
            running_requests_max=int(scheduler.max_running_requests),
            has_tokenizer=scheduler.tokenizer is not None,
            honors_seeds=self._honors_seeds,
            is_embedding=not scheduler.is_generation,
            compatibility_factors=compatibility_factors(scheduler, self._settings),
            bootstrap_port=self.bootstrap_port,
        )
