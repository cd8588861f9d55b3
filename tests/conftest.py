"""Fixtures that any test may ask for. Real servers are in tests/servers.py, what a machine may lack in tests/parts.py.

Coroutine tests run on asyncio's own event loop, not on uvloop: debug mode, virtual time and its error messages need it.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from kvmesh.lifecycle import end_process
from tests.evidence import pytest_runtest_makereport as pytest_runtest_makereport
from tests.servers import Server, consul_server, free_ports, prometheus_server

# How long an example takes, or its generation, says how busy the machine is, and nothing else.
hypothesis.settings.register_profile(
    "untimed", parent=hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
# A shell without job control starts background processes with SIGINT ignored, and the tests' own processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture
def free_port() -> int:
    """A port on loopback that nothing listened on a moment ago; `tests.servers.free_ports` gives several at once."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def consul(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real Consul for the whole run: use service names and keys of your own, and leave it running."""
    with consul_server(tmp_path_factory.mktemp("consul")) as server:
        yield server


@pytest.fixture
def start_consul(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a real Consul of this test's own, `start_consul({"acl": ...})`, that it may kill or configure."""
    with ExitStack() as servers:

        def start(config: Mapping[str, Any] | None = None) -> Server:
            return servers.enter_context(consul_server(tmp_path, config))

        yield start


@pytest.fixture
def start_prometheus(tmp_path: Path) -> Iterator[Callable[[Path], Server]]:
    """Start a real Prometheus with a configuration file."""
    with ExitStack() as servers:

        def start(config: Path) -> Server:
            return servers.enter_context(prometheus_server(tmp_path, config))

        yield start


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process a file of tests at a time, and all of tests/compose as one: those share a Docker daemon and its stack."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/compose" if nodeid.startswith("tests/compose/") else nodeid.split("::", 1)[0]


LONGEST_FIRST = ("compose", "machines", "integration", "security", "conformance", "simulation", "ui")


def _folder_rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that all processes end at about the same time."""
    items.sort(key=_folder_rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Replaces the scheduler of `--dist loadfile`, which would start with the files that have the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A run of one process ends as workers do, or native libraries that tests loaded may turn its status into that of a crash."""
    if not hasattr(config, "workerinput") and any(name.startswith("nixl") for name in sys.modules):
        end_process(config.stash.get(EXIT_STATUS, 1))
