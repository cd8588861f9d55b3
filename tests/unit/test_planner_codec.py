"""Plans over the wire."""

from kvmesh.core import Role
from kvmesh.core.plan import LatencyReport, PlanReport, PoolReport
from kvmesh.rpc.codec.planner import from_plan, to_plan


def test_a_plan_survives_the_wire():
    """What is absent stays absent, zero stays zero."""
    plan = PlanReport(
        mode="observe",
        source="scrape",
        observed_at_s=1700000000.5,
        pools=(
            PoolReport(model="m", role=Role.PREFILL, workers_ready=2, kv_usage=0.0),
            PoolReport(model="m", role=Role.DECODE, workers_planned=3, output_tokens_per_s=1.5),
        ),
        latencies=(LatencyReport(model="m", ttft_mean_s=0.25, requests_per_s=0.0), LatencyReport(model="n")),
        problems=("one", "two"),
    )
    assert from_plan(to_plan(plan)) == plan
