"""Takes the shared stack down and starts it again. Must be the last test of that stack."""

import pytest
from openai import OpenAI

from tests.compose.stack import SERVICES, Stack, get_json, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_second_start_uses_the_state_of_the_first(stack: Stack) -> None:
    """After `down` and `up`, which may change all addresses, the mesh serves, and no service of the earlier containers passes its checks.

    Consul's agents keep their state in volumes. Taking the stack down with its volumes leaves no container, volume or network.
    """
    stack.compose("down", "--timeout", "20")
    stack.compose("up", "--detach", "--wait", "--wait-timeout", "400")
    with OpenAI(base_url=stack.url("KVMESH", "/v1"), api_key="none", max_retries=0) as client:
        wait_for(lambda: [model.id for model in client.models.list()] == ["demo"], "the model is served")
        answer = client.completions.create(model="demo", prompt="Hello", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    token = {"X-Consul-Token": stack.management_token()}
    running = [stack.host_name(each) for name in SERVICES for each in stack.containers(name)]

    def passing() -> set[str]:
        checks = get_json(stack.url("CONSUL", "/v1/health/state/passing"), token)
        return {each["ServiceID"] for each in checks if each["ServiceName"].startswith("kvmesh-")}

    # A service's first heartbeat may come after its container is healthy.
    wait_for(lambda: len(passing()) >= len(running), "all services pass their checks")
    assert len(passing()) == len(running)
    assert all(any(host in service for host in running) for service in passing()), passing()
    stack.compose("down", "--volumes", "--timeout", "10")
    of_stack = ("--quiet", "--filter", f"label=com.docker.compose.project={stack.name}")
    for what in ("container", "volume", "network"):
        assert not stack.docker.run(what, "ls", *(["--all"] if what == "container" else []), *of_stack)
