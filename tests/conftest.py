"""Fixtures for all tests. Real servers are in tests/servers.py, optional parts of the machine in tests/parts.py.

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

# Without deadlines: how long an example takes depends on the load of the machine, not on the code.
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
    """Returns a free port on loopback. `tests.servers.free_ports` returns several at once."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def consul(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real Consul for the whole test run. Tests must use their own service names and keys, and must not stop it."""
    with consul_server(tmp_path_factory.mktemp("consul")) as server:
        yield server


@pytest.fixture
def start_consul(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a real Consul for one test, `start_consul({"acl": ...})`, which the test may kill or configure."""
    with ExitStack() as servers:

        def start(config: Mapping[str, Any] | None = None) -> Server:
            return servers.enter_context(consul_server(tmp_path, config))

        yield start


@pytest.fixture
def start_prometheus(tmp_path: Path) -> Iterator[Callable[[Path], Server]]:
    """Starts a real Prometheus with a configuration file."""
    with ExitStack() as servers:

        def start(config: Path) -> Server:
            return servers.enter_context(prometheus_server(tmp_path, config))

        yield start


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Assigns one test file at a time to each process, and all of tests/compose to one process, because those tests share a Docker stack."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/compose" if nodeid.startswith("tests/compose/") else nodeid.split("::", 1)[0]


LONGEST_FIRST = ("compose", "machines", "integration", "security", "conformance", "simulation", "ui")


def _folder_rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the files that take minutes to the front, so that all processes end at about the same time."""
    items.sort(key=_folder_rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Replaces the scheduler of `--dist loadfile`, which starts with the files that have the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a run without xdist through `end_process`, as workers end: otherwise loaded native libraries may crash at exit and change the
    status."""
    if not hasattr(config, "workerinput") and any(name.startswith("nixl") for name in sys.modules):
        end_process(config.stash.get(EXIT_STATUS, 1))
