"""The rest of a lease when a handle is passed on."""

import pytest

from kvmesh.core import KvHandle
from kvmesh.rpc.codec.legs import spend_lease

HANDLE = KvHandle(
    handle_id="h",
    format="f",
    compatibility_hash="c",
    payload=b"",
    worker_id="p",
    worker_epoch=1,
    tokens=4,
    lease_s=30.0,
)


@pytest.mark.parametrize(
    ("spent_s", "left_s"),
    [(0.0, 30.0), (0.5, 29.5), (29.0, 1.0), (30.0, 1e-6), (34.0, 1e-6), (-1.0, 30.0)],
)
def test_a_lease_is_passed_on_with_its_remaining_time(spent_s: float, left_s: float) -> None:
    """It never exceeds the owner's lease, and is never 0, which would mean that there is no lease."""
    assert spend_lease(HANDLE, spent_s).lease_s == pytest.approx(left_s)
