"""`kvmesh plan`: what the planner observes, wants and did, the alternatives that it compared, and why."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from kvmesh.cli.connection import CALL_TIMEOUT_S, MeshChoice, MeshConnection, MeshTarget, connect, run_command
from kvmesh.cli.output import Row, render_table
from kvmesh.core.planning import Alternative, Decision, Load, PlanReport, Targets
from kvmesh.discovery.base import PLANNER
from kvmesh.errors import UnavailableError
from kvmesh.rpc.planner_client import GrpcPlannerClient
from kvmesh.settings import setting

POOL_COLUMNS = ("MODEL", "ROLE", "READY", "PLANNED", "DRAINING", "FAILING", "RUNNING", "WAITING", "KV USED")
CHOICE_COLUMNS = ("CHOICE", "POOLS", "GOODPUT/S", "WITHIN", "COST/H", "TTFT", "ITL", "TAKES", "LIMITED BY")
DECISION_COLUMNS = ("NO", "MODEL", "ACTION", "POOLS", "REASON", "OUTCOME", "DETAIL")
DECISIONS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class PlanSettings(MeshChoice):
    """What to show."""

    model: str = setting("", "only this model; empty: all")
    watch: bool = setting(False, "print each new plan until Ctrl-C")
    json: bool = setting(False, "print plans as JSON, one line each")


def render_plan(plan: PlanReport) -> str:
    """Returns the plan without past decisions beyond DECISIONS_SHOWN."""
    parts = [_headline(plan), render_table(POOL_COLUMNS, _pool_rows(plan))]
    newest: dict[str, Decision] = {}
    for decision in plan.decisions:
        newest.setdefault(decision.model, decision)
    targets = {each.model: each for each in plan.targets}
    parts += [_model(decision, targets.get(model)) for model, decision in sorted(newest.items())]
    if changes := [each for each in plan.decisions if each.action.changes_pools][:DECISIONS_SHOWN]:
        parts.append(render_table(DECISION_COLUMNS, [_decision_row(each) for each in changes]))
    parts += [f"problem: {problem}" for problem in plan.problems]
    return "\n\n".join(parts)


def _headline(plan: PlanReport) -> str:
    lead = "this planner leads" if plan.is_leader else f"leader: {plan.leader_id or 'none'}"
    return f"mode {plan.mode}, metrics by {plan.source}, {lead}"


def _pool_rows(plan: PlanReport) -> list[Row]:
    return [
        (
            pool.model,
            pool.role.value,
            str(pool.workers_ready),
            "-" if pool.workers_planned is None else str(pool.workers_planned),
            str(pool.workers_draining),
            str(pool.workers_critical),
            str(pool.running_requests),
            str(pool.waiting_requests),
            "-" if pool.kv_usage is None else f"{pool.kv_usage:.0%}",
        )
        for pool in plan.pools
    ]


def _model(decision: Decision, targets: Targets | None) -> str:
    inputs = decision.inputs
    lines = [f"{decision.model}: {decision.action.value} ({decision.reason}){_after(decision.detail)}"]
    if targets is not None:
        lines.append(f"  targets    {_targets(targets)}")
    if inputs.observed.requests_per_s or inputs.predicted.requests_per_s:
        lines.append(f"  observed   {_load(inputs.observed)}")
        error = "" if inputs.predictor_error is None else f", error {inputs.predictor_error:.0%}"
        lines.append(f"  predicted  {_load(inputs.predicted)} by {inputs.predictor}{error}")
        lines.append(f"  corrected  TTFT x {inputs.ttft_correction:.2f}, ITL x {inputs.itl_correction:.2f}")
    lines.append(f"  pools      ready {inputs.ready.text}, wanted {inputs.wanted.text}")
    if decision.alternatives:
        lines += ["", render_table(CHOICE_COLUMNS, [_choice_row(each) for each in decision.alternatives])]
    return "\n".join(lines)


def _after(detail: str) -> str:
    return f": {detail}" if detail else ""


def _targets(targets: Targets) -> str:
    wanted = [
        f"TTFT {targets.ttft_s:g} s" if targets.ttft_s is not None else "",
        f"ITL {1000 * targets.itl_s:g} ms" if targets.itl_s is not None else "",
    ]
    return f"{targets.percentile:.2%} of the requests within {' and '.join(filter(None, wanted))}"


def _load(load: Load) -> str:
    return (
        f"{load.requests_per_s:.2f} requests/s of {load.prompt_tokens:.0f} + {load.output_tokens:.0f} tokens, "
        f"{load.hit_rate:.0%} cached"
    )


def _choice_row(each: Alternative) -> Row:
    return (
        each.action.value,
        each.shape.text,
        f"{each.goodput_per_s:.2f}",
        f"{each.attainment:.1%}",
        f"{each.cost:g}",
        "-" if each.ttft_s is None else f"{each.ttft_s:.3f} s",
        "-" if each.itl_s is None else f"{1000 * each.itl_s:.1f} ms",
        f"{each.takes_s:g} s",
        each.limit or "-",
    )


def _decision_row(decision: Decision) -> Row:
    return (
        str(decision.number),
        decision.model,
        decision.action.value,
        decision.shape.text,
        decision.reason,
        decision.outcome.value,
        decision.outcome_detail or decision.detail,
    )


async def plans_of(connection: MeshConnection, settings: PlanSettings) -> AsyncGenerator[PlanReport, None]:
    """The newest plan, and with `watch` every later one. The leader's if one leads. UnavailableError without a planner."""
    planners = (await connection.registry.instances(PLANNER)).instances
    if not planners:
        raise UnavailableError("no planner is registered; `kvmesh up --plan` starts one", reason="no_planner")
    clients = {each.instance_id: GrpcPlannerClient(connection.channels, each.address) for each in planners}
    client = clients[planners[0].instance_id]
    plan = await client.get_plan(model=settings.model, timeout_s=CALL_TIMEOUT_S)
    if not plan.is_leader and plan.leader_id in clients:
        client = clients[plan.leader_id]
        plan = await client.get_plan(model=settings.model, timeout_s=CALL_TIMEOUT_S)
    if not settings.watch:
        yield plan
        return
    async with aclosing(client.watch_plans(model=settings.model)) as plans:
        async for plan in plans:
            yield plan


async def _show(settings: PlanSettings, target: MeshTarget) -> None:
    async with connect(target) as connection, aclosing(plans_of(connection, settings)) as plans:
        async for plan in plans:
            text = msgspec.json.encode(plan).decode() if settings.json else render_plan(plan) + "\n"
            print(text, flush=True)


def main(argv: Sequence[str]) -> int:
    def act(settings: PlanSettings) -> int:
        asyncio.run(_show(settings, settings.target()))
        return 0

    return run_command(PlanSettings, argv, act, program="kvmesh plan", description=__doc__)
