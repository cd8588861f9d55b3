"""Environment of the engine process. Variables that the user has set stay."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.errors import UnavailableError

PORTS_TRIED = 64
PORTS = range(20000, 32000)
"""Below the kernel's ephemeral ports, which outgoing connections take at any time."""
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
    """The address of a host, which ZeroMQ needs. None: it has none, so SGLang chooses by itself."""
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
    """True where torch sees no GPU."""
    import torch

    return not torch.cuda.is_available()


def free_port(host: str, port: int, *, taken: int = 0) -> int:
    """`port` if it is free, or for 0 a free port other than `taken`.

    It depends on the process, so that engines that start together choose different ones.
    """
    if port:
        _probe(host, port)
        return port
    for attempt in range(PORTS_TRIED):
        candidate = PORTS[(os.getpid() * PORTS_TRIED + attempt) % len(PORTS)]
        if candidate == taken:
            continue
        try:
            _probe(host, candidate)
        except UnavailableError:
            continue
        return candidate
    raise UnavailableError(f"no free port on {host}", reason="no_free_port")


def _probe(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}", reason="port_in_use") from error
