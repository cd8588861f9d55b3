"""The stack that most tests of this folder share. test_stack_restart.py takes it down, so it must run last."""

from collections.abc import Iterator

import pytest

from tests.compose.daemon import Docker, docker_daemon
from tests.compose.stack import Stack, running_stack


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    with docker_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="session")
def stack(docker: Docker) -> Iterator[Stack]:
    """Runs compose.yaml unchanged, with two frontends. Identities, intentions and tokens come from Consul."""
    with running_stack(docker, name="kvmesh-test") as running:
        yield running
