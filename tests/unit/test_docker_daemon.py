"""Whether a Docker daemon of the tests failed to start because of the machine, in which case CI may skip tests."""

import pytest

from tests.compose.daemon import error_of, is_refused

LOG = """\
time="2026-11-28T16:15:40Z" level=info msg="Starting up"
time="2026-11-28T16:15:40Z" level=warning msg="could not setup daemon root propagation: operation not permitted"
"""
IPTABLES = """\
failed to start daemon: Error initializing network controller: iptables failed: Permission denied (you must be root)
 (exit status 4)
"""
CLASH = "failed to start daemon: failed to start containerd: timeout waiting for containerd to start\n"


@pytest.mark.parametrize(("printed", "refused"), [(IPTABLES, True), (CLASH, False), ("", False)])
def test_only_a_refusal_by_the_machine_allows_a_skip(printed: str, refused: bool) -> None:
    """A warning in the log is not the error. dockerd prints its error last, without a timestamp."""
    error = error_of(LOG + printed)
    assert is_refused(error) == refused
    assert error == (printed.strip() or "it does not answer")
