"""The stack of compose/ in real containers: it answers, is hardened, and is monitored."""

import json
import os
import re

import pytest
from openai import OpenAI

from tests.compose.stack import FRONTENDS, Stack, get_json, wait_for

# The first run creates a base image and installs all packages in it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVICES = {"frontend": FRONTENDS, "router": 2, "planner": 1, "prefill": 1, "decode": 2}
HOPS = {"request", "place", "prefill leg", "generate leg"}


def test_a_client_gets_a_streamed_answer(stack: Stack) -> None:
    """The openai client receives a streamed answer through the published port."""
    with OpenAI(base_url=stack.url("KVMESH", "/v1"), api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=20, stream=True
            )
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text and chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len(chunks) > 3


def test_containers_are_hardened(stack: Stack) -> None:
    """No service runs as root, can write to its image, or has a capability."""
    for service in SERVICES:
        [found, *_] = json.loads(stack.docker.run("inspect", *stack.containers(service)))
        assert found["Config"]["User"] == "10001:10001", service
        assert found["Config"]["StopSignal"] == "SIGTERM", service
        assert found["State"]["Health"]["Status"] == "healthy", service
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service


def test_images_are_small(stack: Stack) -> None:
    """Images without an engine are smaller than 300 MB and have no torch."""
    find = "import importlib.util; print(importlib.util.find_spec('torch'))"
    for service in ("frontend", "router", "planner"):
        image = f"kvmesh/{service}:test"
        assert int(stack.docker.run("image", "inspect", "--format", "{{.Size}}", image)) < 300e6
        printed = stack.docker.run("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", find)
        assert printed.strip() == "None"


def test_prometheus_reaches_every_service(stack: Stack) -> None:
    """Prometheus finds every service in Consul under its name."""
    wanted = sorted(f"kvmesh-{service}" for service, count in SERVICES.items() for _ in range(count))

    def all_up() -> bool:
        targets = get_json(stack.url("PROMETHEUS", "/api/v1/targets"))["data"]["activeTargets"]
        up = sorted(each["labels"]["service"] for each in targets if each["health"] == "up")
        return up == wanted and len(targets) == len(wanted)

    wait_for(all_up, f"targets are {wanted}")


def test_a_trace_spans_all_hops(stack: Stack) -> None:
    """The spans of frontend, router, prefill and decode at the OTLP receiver have the client's trace id."""
    trace_id = os.urandom(16).hex()
    with OpenAI(base_url=stack.url("KVMESH", "/v1"), api_key="none", max_retries=0) as client:
        client.completions.create(
            model="demo",
            prompt="word " * 300,
            max_tokens=5,
            extra_headers={"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"},
        )

    def arrived() -> bool:
        spans = get_json(stack.url("COLLECTOR", "/spans"))
        of_trace = {service: [span for span in each if span["trace"] == trace_id] for service, each in spans.items()}
        names = {span["name"] for each in of_trace.values() for span in each}
        services = {service for service, each in of_trace.items() if each}
        return names >= HOPS and len(services) >= 4

    wait_for(arrived, "the spans of all hops")


def test_secrets_are_only_in_files(stack: Stack) -> None:
    """No token or secret is in a container's configuration, process list or log, and each service has a separate token."""
    tokens = {}
    for service in SERVICES:
        [container, *_] = stack.containers(service)
        for name in ("registry-token", "mesh-secret"):
            path = f"/credentials/own/{name}"
            tokens[service, name] = stack.docker.run("exec", container, "cat", path).strip()
        modes = stack.docker.run("exec", container, "stat", "--format", "%a %u", "/credentials/own", path)
        assert modes.split() == ["700", "10001", "600", "10001"], service
    assert len({tokens[service, "registry-token"] for service in SERVICES}) == len(SERVICES)
    secrets = {*tokens.values(), stack.management_token()}
    ids = stack.docker.run(
        "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={stack.name}"
    ).split()
    shown = (
        stack.docker.run("inspect", *ids)
        + stack.compose("logs", "--no-color")
        + stack.docker.run("events", "--since", "1h", "--until", "0s")
    )
    processes = "".join(stack.docker.run("top", each) for each in stack.docker.run("ps", "--quiet").split())
    assert all(len(each) > 30 for each in secrets)
    assert [each for each in secrets if each in shown + processes] == []


def test_the_operators_commands_work(stack: Stack) -> None:
    """The operator's commands of docs/deploy/compose.md work."""
    status = stack.compose("run", "--rm", "--no-TTY", "operator", "status")
    assert status.count("decode-") >= 2, status
    doctor = stack.compose("run", "--rm", "--no-TTY", "operator", "doctor")
    assert len(re.findall(r"KV transfer +ok", doctor)) == SERVICES["decode"], doctor
