"""An address of this machine that is not loopback, for tests of meshes on several machines."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.errors import MeshError
from kvmesh.network.hosts import address_towards
from kvmesh.network.names import is_loopback

DUMMY, DUMMY_ADDRESS = "kvmesh-test0", "198.51.100.7"
"""An address reserved for documentation (RFC 5737), on a dummy interface."""


@contextmanager
def own_address() -> Iterator[str]:
    """Yields the address of the default route, or that of a dummy interface if the tests run as root. Otherwise skips the test."""
    try:
        found = address_towards("192.0.2.1")
    except MeshError:
        found = ""
    if found and not is_loopback(found):
        yield found
        return
    # One test at a time, because the interface has one name.
    with (Path(tempfile.gettempdir()) / f"{DUMMY}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.which("ip"):
            _ip("link", "delete", DUMMY)  # Of a test that was killed.
        if os.getuid() or not shutil.which("ip") or _ip("link", "add", DUMMY, "type", "dummy"):
            pytest.skip("this machine has only loopback addresses, and no dummy interface can be made")
        try:
            _ip("address", "add", f"{DUMMY_ADDRESS}/32", "dev", DUMMY)
            _ip("link", "set", DUMMY, "up")
            yield DUMMY_ADDRESS
        finally:
            _ip("link", "delete", DUMMY)


def _ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode
