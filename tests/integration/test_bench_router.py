"""The router's benchmark through gRPC measures a router that answers."""

from bench import router_grpc
from kvmesh.lifecycle import run


def test_asks_through_grpc_are_answered_and_counted():
    """About as many answers as asks, none refused, with latencies and a cost; and the same of gRPC alone."""
    for is_bare in (False, True):
        row = dict(
            zip(
                router_grpc.COLUMNS,
                run(router_grpc.measure(4, 8, 2, rate=100.0, for_s=1.0, is_bare=is_bare)),
                strict=True,
            )
        )
        assert int(row["asks/s"]) > 20
        assert row["refused"] == "0"
        assert 0 < float(row["p50 ms"]) <= float(row["p99 ms"])
        assert float(row["router us CPU/ask"]) > 0
