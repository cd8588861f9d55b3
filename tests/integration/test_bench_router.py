"""The router's gRPC benchmark measures a router that answers."""

from itertools import product

from bench import router_grpc
from bench.pacing import Arrivals
from kvmesh.lifecycle import run


def test_asks_through_grpc_are_answered_and_counted():
    """With and without the router's own work, and for both kinds of arrivals, asks are answered, and none is refused. The row has latencies
    and a cost."""
    for is_bare, arrivals in product((False, True), Arrivals):
        case = router_grpc.Case(workers=4, blocks=8, depths=2, arrivals=arrivals, frontends=2, is_bare=is_bare)
        row = dict(zip(router_grpc.COLUMNS, run(router_grpc.measure(case, rate=100.0, for_s=2.0)), strict=True))
        # On an idle machine about as many as are sent.
        assert int(row["asks/s"]) > 0
        assert row["refused"] == "0"
        assert 0 < float(row["p50 ms"]) <= float(row["p99 ms"])
        assert float(row["router us CPU/ask"]) > 0
