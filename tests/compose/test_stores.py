"""Options that are off in compose.yaml: certificates from files, and one PostgreSQL for all frontends."""

import json
from collections.abc import Iterator
from io import BytesIO

import pytest
from openai import OpenAI

from tests.compose.daemon import Docker
from tests.compose.stack import Stack, running_stack, wait_for
from tests.connect_identities import REFUSED, presented_uri, s_client
from tests.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "Hello"}}\n'
PASSWORD = "/generated/postgres/password"


@pytest.fixture(scope="module")
def stack(docker: Docker) -> Iterator[Stack]:
    overlays = (ROOT / "compose" / "postgres.yaml", ROOT / "tests" / "compose" / "overlay-postgres.yaml")
    few = {"KVMESH_ROUTERS": "1", "KVMESH_DECODE": "1"}
    with running_stack(docker, *overlays, name="kvmesh-test-stores", KVMESH_MESH_IDENTITY="files", **few) as running:
        yield running


def test_certificates_may_come_from_files(stack: Stack) -> None:
    """With certificates of a private authority, clients, Prometheus and the operator are served, and clients without a certificate are refused.

    No service has another service's certificate.
    """
    with OpenAI(base_url=stack.url("KVMESH", "/v1"), api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt="word " * 200, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    wait_for(lambda: len(stack.query('up{job="kvmesh"} == 1')) == 6, "all services are scraped")
    assert "decode-" in stack.compose("run", "--rm", "--no-TTY", "operator", "status")
    for role in ("router", "prefill", "decode", "planner"):
        [container] = stack.containers(role)
        host = stack.address(container)
        assert presented_uri(f"{host}:7000") == f"spiffe://kvmesh/svc/kvmesh-{role}"
        assert s_client(host, 7000) == REFUSED
        assert stack.docker.run("exec", container, "ls", "/credentials/own/tls").split() == [role]


def test_frontends_have_one_store_in_postgresql(stack: Stack) -> None:
    """A frontend returns what the other one stored, even after the frontends' volume is lost. The password is only in a file."""
    first, second = (OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in stack.frontends)
    with first, second:
        file = first.files.create(file=("lines.jsonl", BytesIO(LINE)), purpose="batch")
        response = first.responses.create(model="demo", input="Hello", max_output_tokens=16)
        assert second.files.retrieve(file.id).bytes == len(LINE)
        assert second.responses.retrieve(response.id).output_text == response.output_text
        stack.compose("rm", "--stop", "--force", "frontend")
        stack.docker.run("volume", "rm", f"{stack.name}_frontend-state")
        stack.compose("up", "--detach", "--no-deps", "--wait", "frontend")
        assert second.files.content(file.id).read() == LINE
        assert first.responses.retrieve(response.id).output_text == response.output_text
    [container, *_] = stack.containers("frontend")
    password = stack.docker.run("exec", container, "cat", PASSWORD).strip()
    shown = stack.docker.run("inspect", container, *stack.containers("postgres")) + stack.compose("logs", "--no-color")
    assert len(password) > 30 and password not in shown
    [database] = json.loads(stack.docker.run("inspect", *stack.containers("postgres")))
    assert database["HostConfig"]["ReadonlyRootfs"] and database["Config"]["User"] == "999:999"
