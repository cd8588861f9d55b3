"""A private PostgreSQL cluster on loopback, in a temporary directory."""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.integration.mesh import children_of, is_running, process_state
from tests.parts import require_part
from tests.servers import HOST, free_ports

PASSWORD = "not-in-any-log"
USER = "kvmesh"
START_S_MAX = 60.0
# Durable as in production, because tests kill the server and then check the committed data.
CONNECTIONS_MAX = 40
CONFIGURATION = f"""
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = {CONNECTIONS_MAX}
shared_buffers = 16MB
dynamic_shared_memory_type = mmap
"""


@dataclass(slots=True)
class Cluster:
    """A server that tests may stop, kill and restart. All databases have the same user."""

    directory: Path
    binary: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    databases: list[str] = field(default_factory=list)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/{database}"

    def new_database(self) -> str:
        """Creates an empty database and returns its URL."""
        name = f"mesh{len(self.databases)}"
        self.run(f"CREATE DATABASE {name}")
        self.databases.append(name)
        return self.url(name)

    def run(self, statement: str, url: str = "") -> list[tuple[object, ...]]:
        """Runs one statement outside a transaction and returns its rows."""
        with psycopg.connect(url or self.url(), password=PASSWORD, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        self.spawn()
        self.wait_up()

    async def start_again(self, *, file_bytes_max: int = 0) -> None:
        """Restarts the server from a coroutine. Spawns in the calling thread, because the kernel kills the server when the thread that spawned
        it ends.

        `file_bytes_max`: size limit of the server's files, which simulates a full disk. 0: no limit.
        """
        self.spawn(file_bytes_max)
        await asyncio.to_thread(self.wait_up)

    def spawn(self, file_bytes_max: int = 0) -> None:
        limit = ["prlimit", f"--fsize={file_bytes_max}"] if file_bytes_max else []
        command = [*limit, *as_user(), str(self.binary), "-D", str(self.directory / "data"), "-p", str(self.port)]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")

    def wait_up(self) -> None:
        end = time.monotonic() + START_S_MAX
        while time.monotonic() < end:
            with suppress(psycopg.OperationalError):
                self.run("SELECT 1")
                return
            if self.process is None or self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start:\n{(self.directory / 'log').read_text()[-3000:]}")

    def kill(self) -> None:
        """Kills the server and its child processes with SIGKILL, as a power failure would."""
        assert self.process is not None
        self._stop_forking()
        children = children_of(self.process.pid)
        for pid in [*children, self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        # The server does not start again while one of them has the shared memory.
        end = time.monotonic() + START_S_MAX
        while any(map(is_running, children)):
            assert time.monotonic() < end, "a killed process does not end"
            time.sleep(0.001)

    def signal_all(self, number: int) -> None:
        """Sends a signal, such as SIGSTOP, to the server and its child processes. After SIGSTOP waits until they have stopped."""
        assert self.process is not None
        self._stop_forking()
        pids = [*children_of(self.process.pid), self.process.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + START_S_MAX
        while number == signal.SIGSTOP and any(process_state(pid) not in ("T", "Z") for pid in pids):
            assert time.monotonic() < end, "the server does not stop"
            time.sleep(0.001)

    def _stop_forking(self) -> None:
        """Stops the server's first process, so that no child starts after its children are listed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + START_S_MAX
        while process_state(self.process.pid) not in ("T", "Z"):
            assert time.monotonic() < end, "the server does not stop"
            time.sleep(0.001)

    def stop(self) -> None:
        """Shuts the server down in fast mode, which closes all connections."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=START_S_MAX)
            self.process = None


def as_user() -> list[str]:
    """Returns the command prefix for PostgreSQL, which refuses to run as root. The server dies with the test process."""
    words = ["setpriv", "--pdeathsig", "INT"]
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        words += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return words


@contextmanager
def postgres_cluster() -> Iterator[Cluster]:
    """Runs a cluster whose user needs a password."""
    binary = require_part("postgres")
    # Not in pytest's temporary directory, which other users cannot enter.
    directory = Path(tempfile.mkdtemp(prefix="kvmesh-postgres-"))
    cluster = Cluster(directory=directory, binary=binary, port=free_ports(1)[0])
    try:
        (directory / "password").write_text(PASSWORD)
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            for path in (directory, directory / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        made = subprocess.run(
            [*as_user(), str(binary.with_name("initdb")), "-D", str(directory / "data"), "-U", USER, "-E", "UTF8",
             "--locale", "C", "-A", "scram-sha-256", "--pwfile", str(directory / "password"), "--no-sync"],
            capture_output=True, text=True, cwd="/", check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        with (directory / "data" / "postgresql.conf").open("a") as configuration:
            configuration.write(CONFIGURATION)
        cluster.start()
        yield cluster
    finally:
        if cluster.process is not None:
            cluster.signal_all(signal.SIGCONT)
            cluster.kill()
        shutil.rmtree(directory, ignore_errors=True)
