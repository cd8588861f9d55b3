"""Environment of the engine process. Variables that the user has set stay."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvmesh.engines.sglang.settings import SglangSettings

DEFAULTS = {
    # Two engines on two cores with two spinning threads each are several times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    # Log-probabilities of the model itself, as other engines give them: before temperature and penalties.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "1",
}


def set_process_defaults() -> None:
    """Sets the variables that do not depend on settings. Call it before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def set_defaults(settings: SglangSettings) -> None:
    set_process_defaults()
    # Whole seconds. A prefill engine waits for the other side to come, a decode engine for the prompt, which takes longer.
    os.environ.setdefault("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(max(1, round(settings.pull_timeout_s))))
    os.environ.setdefault("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(max(1, round(settings.lease_s))))
    if (address := numeric_address(settings.bootstrap_host)) is not None:
        # The ZeroMQ sockets between prefill and decode engines. SGLang would take the address of the first network interface.
        os.environ.setdefault("SGLANG_HOST_IP", address)
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def numeric_address(host: str) -> str | None:
    """Returns the address of a host, which ZeroMQ needs. None: the host has none, so SGLang chooses one."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def bind_ranks(settings: SglangSettings) -> None:
    """Divides the cores among the ranks of this machine. By itself SGLang's CPU engine gives each rank a NUMA node."""
    if settings.tensor_parallel_size > 1:
        os.environ.setdefault(
            "SGLANG_CPU_OMP_THREADS_BIND", core_groups(sorted(os.sched_getaffinity(0)), len(settings.ranks_here))
        )


def core_groups(cores: Sequence[int], ranks: int) -> str:
    """SGLang's list of cores of each rank. Ranks share cores where there are fewer of these."""
    share = max(1, len(cores) // ranks)
    starts = [rank * share % len(cores) for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in cores[start : start + share]) for start in starts)


def uses_cpu() -> bool:
    """Returns True where torch sees no GPU."""
    import torch

    return not torch.cuda.is_available()
