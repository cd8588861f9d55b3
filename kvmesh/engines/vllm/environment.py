"""Environment variables that must be set before torch, vllm and nixl are imported. Variables that the user has set stay."""

import importlib
import importlib.metadata
import logging
import os
import re
import sys
from pathlib import Path

from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.kv.nixl_api import set_progress_delay
from kvmesh.kv.tcp_limits import TCP_LIMITS
from kvmesh.network.names import LOOPBACK
from kvmesh.network.ports import free_port

DEFAULTS = {
    # One process: vLLM's engine processes would outlive a killed parent.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Two engines on two cores with two spinning threads each are 5 to 23 times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Ranks on CPU: vLLM's own binding needs a NUMA node for each and refuses to start without.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    # Full digests: 64-bit hashes could collide and corrupt the translation of KV events.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    **TCP_LIMITS,
}
PLUGIN_GROUP = re.compile(r"vllm\.[a-z_]*plugins")
VLLM_NAMES = ("vllm", "vllm-cpu")


def set_defaults() -> None:
    """Sets the variables that do not depend on settings. The fork server calls this before it knows any settings."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "VLLM_PLUGINS" not in os.environ:
        os.environ["VLLM_PLUGINS"] = ",".join(user_plugins())


def user_plugins() -> list[str]:
    """Returns the names of vLLM plugins of other packages. vLLM's own take half a second to load and do nothing here."""
    return sorted(
        {
            entry.name
            for distribution in importlib.metadata.distributions()
            for entry in distribution.entry_points
            if PLUGIN_GROUP.fullmatch(entry.group) and distribution.metadata["Name"] not in VLLM_NAMES
        }
    )


PROGRESS_DELAY_US = 200
"""Sleep of NIXL's progress thread between polls. At NIXL's default of 0 the thread uses a whole core per engine."""


def prepare(settings: VllmSettings) -> int:
    """Sets the environment for one engine in this process. Returns the port of the NIXL side channel."""
    set_defaults()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level)
    # In a child of the fork server vLLM has configured its logger from the server's environment already.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    use_thread_count()
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if settings.nodes > 1:
        # The address at which ranks on other machines get the scheduler's messages.
        os.environ.setdefault("VLLM_HOST_IP", settings.side_channel_host or LOOPBACK)
    host = settings.side_channel_host or LOOPBACK
    port = free_port(host, settings.side_channel_port, listener="the NIXL side channel")
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    return port


def use_thread_count() -> None:
    """Gives torch OMP_NUM_THREADS threads. The fork server has loaded torch with one thread."""
    torch, count = sys.modules.get("torch"), os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if torch is not None and count.isdecimal() and int(count) > 0:
        torch.set_num_threads(int(count))


def reduce_nixl_polling() -> None:
    """Makes the progress threads of vLLM's NIXL agents sleep between polls."""
    set_progress_delay(importlib.import_module("nixl._api"), PROGRESS_DELAY_US)
