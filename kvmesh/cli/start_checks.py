"""Checks of `kvmesh up` before it starts any process: ports, Consul agent, and the hub if the model is not a directory."""

import asyncio
import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from kvmesh.network.causes import connection_cause

CONSUL_LIMIT_S = 30.0
CONSUL_RETRY_S = 1.0
HUB_TIMEOUT_S = 5.0
_LISTENING = "0A"
"""A socket's state in /proc/net/tcp."""


def port_problems(host: str, *ports: int) -> str:
    """Returns why the frontend cannot listen on a port, with the process that has it; empty if it can. Port 0: any free one."""
    for port in ports:
        if not port:
            continue
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                # Servers set this too, so ports of connections in TIME_WAIT count as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except PermissionError:
            return f"port {port} needs root; use --port with a number above 1023"
        except socket.gaierror as error:
            return f"{host} is not an address of this machine: {error.strerror}; see --host"
        except OSError as error:
            flag = "--grpc-port" if port == ports[-1] != ports[0] else "--port"
            if error.strerror and "in use" in error.strerror:
                return f"port {port} is taken by {_holder(port)}; use {flag}"
            return f"cannot listen on {host} port {port}: {error.strerror}; see --host and {flag}"
    return ""


def _holder(port: int) -> str:
    """Returns the process that listens on a port: "PID 123 (name)". Other users' processes show no sockets to this one."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link) in inodes for link in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().split(b"\0")[:3]
                return f"PID {folder.parent.name} ({b' '.join(words).decode(errors='replace').strip()})"
        except OSError:  # It has ended, or it belongs to another user.
            continue
    return "a process of another user"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def engine_problem(engine: str) -> str:
    """Returns that the engine's packages are missing, and how to install them; empty if they are here.

    Only vLLM is checked. SGLang may have a Python of its own, which the worker looks for.
    """
    if engine != "vllm" or importlib.util.find_spec("vllm") is not None:
        return ""
    return (
        "vLLM is not installed here: `KVMESH_ENGINE_BUILD=cpu make up` installs it (with NVIDIA GPUs"
        " KVMESH_ENGINE_BUILD=gpu); --engine simulated needs no engine"
    )


async def consul_problem(address: str, *, say: Callable[[str], None], limit_s: float = CONSUL_LIMIT_S) -> str:
    """Waits up to `limit_s` for a Consul agent to answer. Returns why it does not; empty if it does.

    Prints once that it waits.
    """
    url = address if "://" in address else f"http://{address}"
    deadline = time.monotonic() + limit_s
    is_said = False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HUB_TIMEOUT_S)) as session:
        while True:
            try:
                async with session.get(f"{url.rstrip('/')}/v1/status/leader") as response:
                    # 403: the agent runs and requires a token.
                    if response.status < 500:
                        return ""
                    cause = f"it answers {response.status} {(await response.text())[:100].strip()}"
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                cause = connection_cause(error, timeout_s=HUB_TIMEOUT_S)
            if not is_said:
                is_said = True
                say(f"the Consul agent at {address} cannot be reached: {cause}; retrying for {limit_s:g} s")
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return f"the Consul agent at {address} did not answer for {limit_s:g} s: {cause}; see --consul"
            await asyncio.sleep(min(CONSUL_RETRY_S, remaining_s))


def is_hub_name(model: str) -> bool:
    """Returns True if the model is a name on a model hub: `name` or `organisation/name`, and not a directory."""
    return not Path(model).expanduser().exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None


async def hub_problem(model: str, *, say: Callable[[str], None]) -> str:
    """Returns why the hub does not offer a model and what to do; empty if it does. Prints which model the hub offers."""
    import huggingface_hub
    from huggingface_hub import constants

    if isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
        say(f"{model} is a name on the Hugging Face hub and in this machine's cache, {constants.HF_HUB_CACHE}")
        return ""
    instead = (
        f"no directory is named {model}, so it is taken for a name on the Hugging Face hub, {constants.ENDPOINT}, {{}}."
        f" Give --model a model directory, or copy it where the hub can be reached: hf download {model} --local-dir DIR"
    )
    if constants.HF_HUB_OFFLINE:
        return instead.format("which HF_HUB_OFFLINE forbids to ask")
    headers = {"authorization": f"Bearer {token}"} if (token := huggingface_hub.get_token()) else {}
    timeout = aiohttp.ClientTimeout(total=HUB_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=True) as session,
            session.get(f"{constants.ENDPOINT}/api/models/{model}") as response,
        ):
            if response.status in (401, 403, 404):
                return instead.format("which has no such model, or only for those who set HF_TOKEN")
            if response.status >= 500:
                return instead.format(f"which answers {response.status}")
    except (aiohttp.ClientError, TimeoutError) as error:
        return instead.format(f"which cannot be reached: {connection_cause(error, timeout_s=HUB_TIMEOUT_S)}")
    say(
        f"{model} is a name on the Hugging Face hub, {constants.ENDPOINT}; workers download it to {constants.HF_HUB_CACHE}"
    )
    return ""
