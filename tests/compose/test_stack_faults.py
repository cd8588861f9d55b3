"""Killing, stopping, scaling and updating containers of the stack under load fails no request."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compose.load import Load, running_load
from tests.compose.stack import SERVICES, Stack, get_json, wait_for
from tests.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DASHBOARDS = sorted((ROOT / "compose" / "grafana" / "dashboards").glob("*.json"))
STREAMS = 6
AWAY_S = 10.0
"""Longer than the TTL of a service's check, which is 6 s."""
UP = ("up", "--detach", "--no-deps", "--no-recreate", "--wait")


async def run_under_load(load: Load, action: Callable[..., object], *arguments: object) -> None:
    """Runs the action, then waits for the answers to requests that began after it."""
    await asyncio.to_thread(action, *arguments)
    await load.wait_answers(2 * STREAMS)


async def test_killed_containers_fail_no_request(stack: Stack) -> None:
    """No request fails when a decode worker, the only prefill worker and a router are killed and started again by `docker compose up`.

    The alert for the dead worker fires, and each query of the dashboards has data.
    """
    async with running_load(stack.frontends, STREAMS) as load:
        await load.wait_answers(STREAMS)
        lost = [stack.containers(service)[0] for service in ("decode", "prefill", "router")]
        for container in lost:
            # Docker restarts a container whose process dies, but not one that `docker kill` ended, which stays away like a lost machine.
            await run_under_load(load, stack.docker.run, "kill", container)
        await asyncio.to_thread(wait_for, lambda: is_firing(stack, lost[0]), "the alert for the dead worker fires")
        await asyncio.to_thread(stack.docker.run, "rm", *lost)
        await run_under_load(load, stack.compose, *UP, "decode", "prefill", "router")
        await asyncio.to_thread(wait_for, lambda: not panels_without_data(stack), "every panel has data")
    assert load.failures == [], stack.logs()


async def test_scaled_and_updated_containers_fail_no_request(stack: Stack) -> None:
    """No request fails when decode workers are scaled up and down, and decode workers, routers and frontends are updated."""
    async with running_load(stack.frontends, STREAMS) as load:
        for count in (3, 2):
            await run_under_load(load, stack.compose, *UP, "--scale", f"decode={count}", "decode")
            assert len(stack.containers("decode")) == count
        for service in ("decode", "router", "frontend"):
            before = set(stack.containers(service))
            await run_under_load(load, update, stack, service)
            after = set(stack.containers(service))
            assert len(after) == len(before) and not before & after
    assert load.failures == [], stack.logs()


async def test_an_outage_of_consul_fails_no_request(stack: Stack) -> None:
    """No request fails while Consul's agent or server is stopped, or both restart. Afterwards all services pass their checks."""
    async with running_load(stack.frontends, STREAMS) as load:
        await load.wait_answers(STREAMS)
        for service in ("consul", "consul-server"):
            (container,) = stack.containers(service)
            stack.docker.run("kill", "--signal", "STOP", container)
            try:
                await asyncio.sleep(AWAY_S)
                await load.wait_answers(2 * STREAMS)
            finally:
                stack.docker.run("kill", "--signal", "CONT", container)
            await run_under_load(load, wait_for, lambda: serving(stack), f"all services pass after {service} continues")
        await run_under_load(load, stack.compose, "restart", "--timeout", "0", "consul", "consul-server")
        await run_under_load(load, wait_for, lambda: serving(stack), "all services pass after Consul restarts")
    assert load.failures == [], stack.logs()


async def test_stopping_every_decode_worker_fails_no_running_request(stack: Stack) -> None:
    """After `docker compose stop decode`, running requests finish and the workers exit with 0. After a start the mesh answers again."""
    async with running_load(stack.frontends, 0, tokens=500) as load:
        streams = [await load.open_stream(f"Stream number {number}.") for number in range(STREAMS)]
        for stream in streams:
            await anext(stream)
        workers = stack.containers("decode")
        stopping = asyncio.create_task(asyncio.to_thread(stack.compose, "stop", "decode"))
        for stream in streams:
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length", chunks[-1]
        await stopping
        assert [exit_code(stack, each) for each in workers] == [0] * len(workers)
        await asyncio.to_thread(stack.compose, *UP, "decode")
        await asyncio.to_thread(
            wait_for, lambda: stack.query("kvmesh_router_decode_workers == 2"), "the decode workers are back"
        )
        assert await load.ask("Hello")


def serving(stack: Stack) -> bool:
    """Returns whether Consul lists every container of the mesh as passing, and no other service."""
    token = {"X-Consul-Token": stack.management_token()}
    checks = get_json(stack.url("CONSUL", "/v1/health/state/any"), token)
    of_mesh = {each["ServiceID"]: each["Status"] for each in checks if each["ServiceName"].startswith("kvmesh-")}
    return set(of_mesh.values()) == {"passing"} and len(of_mesh) == sum(
        len(stack.containers(name)) for name in SERVICES
    )


def is_firing(stack: Stack, container: str) -> bool:
    """Returns whether the alert for a service that is down fires for this container."""
    host = stack.host_name(container)
    firing = stack.query('ALERTS{alertname="KvmeshServiceDown", alertstate="firing"}')
    return any(host in each["metric"]["instance"] for each in firing)


def exit_code(stack: Stack, container: str) -> int:
    """Returns the exit code of a container that has ended."""
    return int(stack.docker.run("inspect", "--format", "{{.State.ExitCode}}", container))


def update(stack: Stack, service: str) -> None:
    """Replaces the containers of a service as docs/deploy/compose.md describes."""
    files = [word for path in stack.files for word in ("-f", str(path))]
    finished = subprocess.run(
        [sys.executable, ROOT / "compose" / "update.py", service, "-p", stack.name, *files],
        env={**os.environ, **stack.docker.environment, **stack.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def panels_without_data(stack: Stack) -> list[str]:
    """Returns the queries of the dashboards for which the stack's Prometheus has no data."""
    empty = []
    for path in DASHBOARDS:
        for panel in json.loads(Path(path).read_text())["panels"]:
            for target in panel["targets"]:
                result = stack.query(target["expr"].replace("$__rate_interval", "30s"))
                if not any(each["value"][1] != "NaN" for each in result):
                    empty.append(f"{path.stem}: {panel['title']}: {target['expr']}")
    print(*empty, sep="\n")
    return empty
