"""Environment variables that must be set before torch, vllm and nixl are imported. A user's own values stay."""

import importlib
import importlib.metadata
import logging
import os
import re
import socket
import sys
from pathlib import Path

from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import UnavailableError
from kvmesh.kv.nixl_api import set_progress_delay

DEFAULTS = {
    # One process: children of vLLM's own engine outlive a killed parent.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Two engines on two cores with two spinning threads each are 5 to 23 times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Ranks on CPU: vLLM's own binding wants a NUMA node for each and refuses to start without.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    # Full digests: 64 bits of a hash could collide and corrupt the translation of KV events.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
}


PLUGIN_GROUP = re.compile(r"vllm\.[a-z_]*plugins")
VLLM_NAMES = ("vllm", "vllm-cpu")


def set_defaults() -> None:
    """The part that no setting changes; the fork server needs it before it knows any."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "VLLM_PLUGINS" not in os.environ:
        os.environ["VLLM_PLUGINS"] = ",".join(user_plugins())


def user_plugins() -> list[str]:
    """Names of vLLM plugins that other packages install. vLLM's own cost half a second to load and do nothing here."""
    return sorted(
        {
            entry.name
            for distribution in importlib.metadata.distributions()
            for entry in distribution.entry_points
            if PLUGIN_GROUP.fullmatch(entry.group) and distribution.metadata["Name"] not in VLLM_NAMES
        }
    )


PORTS_TRIED = 64
PROGRESS_DELAY_US = 200
"""Sleep of NIXL's progress thread between polls. At 0, NIXL's own choice, the thread takes a whole core per engine."""


def prepare(settings: VllmSettings) -> int:
    """Sets the environment for one engine in this process; the NIXL side channel's port."""
    set_defaults()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level)
    # In a child of the fork server vLLM has configured its logger already, by the server's environment.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    use_thread_count()
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    port = free_port(settings.side_channel_host, settings.side_channel_port)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.side_channel_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    return port


def use_thread_count() -> None:
    """Gives torch the threads that OMP_NUM_THREADS names. The fork server loads torch with one, whatever that says."""
    torch, count = sys.modules.get("torch"), os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if torch is not None and count.isdecimal() and int(count) > 0:
        torch.set_num_threads(int(count))


def free_port(host: str, port: int) -> int:
    """`port` if it is free, or a free one for 0. UnavailableError otherwise: vLLM would wait for its listener for ever.

    vLLM takes a number only and listens some seconds later. Until then any outgoing connection may be given a port of the
    kernel's own range, so one outside it is chosen, and by process, so that engines that start together do not meet.
    """
    if port:
        _probe(host, port)
        return port
    first, count = _quiet_ports()
    for attempt in range(PORTS_TRIED):
        candidate = first + (os.getpid() * PORTS_TRIED + attempt) % count
        try:
            _probe(host, candidate)
        except UnavailableError:
            continue
        return candidate
    raise UnavailableError(f"no free port for the NIXL side channel on {host}", reason="no_free_port")


def _quiet_ports() -> tuple[int, int]:
    """First and number of ports below the range that the kernel gives to outgoing connections; 20000 up by default."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32768
    first = min(20000, lowest // 2)
    return max(1024, first), max(1, lowest - max(1024, first))


def _probe(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnavailableError(f"the NIXL side channel cannot listen on {host}:{port}: {error.strerror}") from error


def calm_nixl() -> None:
    """Lets the progress threads of vLLM's NIXL agents sleep between polls."""
    set_progress_delay(importlib.import_module("nixl._api"), PROGRESS_DELAY_US)
