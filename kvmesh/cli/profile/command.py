"""`kvmesh profile`: measures how fast an engine is, through a worker of a running mesh, and writes a profile file.

The mesh should serve no other requests at the same time. The file gives the points, the fitted coefficients, how well they fit, and the
machine.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

from kvmesh.checks import is_whole_number
from kvmesh.cli.connection import CALL_TIMEOUT_S, MeshChoice, MeshTarget, connect, run_command
from kvmesh.cli.profile.measure import EngineMeter, FrontendLegs, Legs
from kvmesh.cli.profile.page import page
from kvmesh.cli.profile.sweep import SweepPlan, sweep
from kvmesh.client import AsyncClient
from kvmesh.core.engine_profile import EngineProfile, read_engine_profile, to_text
from kvmesh.core.worker import Handoff
from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, Instance
from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError
from kvmesh.rpc.plain_legs import PlainLegClient
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import setting

CALLS = 21


@dataclass(frozen=True, kw_only=True)
class ProfileCommandSettings(MeshChoice):
    """What to measure."""

    worker: str = setting("", "id of the decode worker; empty: the first one")
    out: str = setting("", "file to write; empty: standard output")
    html: str = setting("", "file for a page with plots")
    show: str = setting(
        "", "print the flags for services from a profile file, and measure nothing; with `html` also write the page"
    )
    prompt_tokens: tuple[str, ...] = setting(("64", "256", "512", "1024", "2048"), "lengths of prompts; two at least")
    prompt_batches: tuple[str, ...] = setting(("1", "4"), "prompts that arrive at once")
    contexts: tuple[str, ...] = setting(("64", "1024"), "prompt tokens of decoding requests")
    decode_batches: tuple[str, ...] = setting(("1", "2", "4", "8"), "requests that decode together")
    decode_tokens: int = setting(32, "tokens per request of a decode point", min=4, max=4096)
    repeats: int = setting(3, "measurements per point", min=1, max=100)
    through: str = setting(
        "worker",
        "`worker`: requests go to the worker itself, so that times are the engine's; `frontend`: through the mesh's frontend, so that they"
        " include what the mesh adds, for a mesh of one worker whose clients need no key",
        choices=("worker", "frontend"),
    )
    timeout_s: float = setting(120.0, "longest wait for one request", min=1)


async def measure(settings: ProfileCommandSettings, target: MeshTarget) -> EngineProfile:
    """Measures a worker of a running mesh."""
    async with connect(target) as connection, AsyncExitStack() as stack:
        client = GrpcWorkerClient(connection.channels)
        decode = _choose((await connection.registry.instances(DECODE)).instances, settings.worker)
        described = await client.describe(decode.address, timeout_s=CALL_TIMEOUT_S)
        prefill = ""
        if Handoff.SEQUENTIAL in described.capabilities.handoffs:
            with suppress(NotFoundError):
                mine = (await connection.registry.instances(PREFILL)).instances
                prefill = _choose([each for each in mine if each.meta.get("model") == described.model.name], "").address
        workers = PlainLegClient(connection.channels)
        legs: Legs = workers
        if settings.through == "frontend":
            frontend = _choose((await connection.registry.instances(FRONTEND)).instances, "")
            legs = FrontendLegs(await stack.enter_async_context(AsyncClient(frontend.address)))
        meter = EngineMeter(
            client=legs,
            workers=workers,
            decode_address=decode.address,
            decode=described,
            prefill_address=prefill,
            timeout_s=settings.timeout_s,
            random=Random(),
        )
        plan = SweepPlan(
            prompt_tokens=numbers(settings.prompt_tokens, "prompt_tokens"),
            prompt_batches=numbers(settings.prompt_batches, "prompt_batches"),
            contexts=numbers(settings.contexts, "contexts"),
            decode_batches=numbers(settings.decode_batches, "decode_batches"),
            decode_tokens=settings.decode_tokens,
            repeats=settings.repeats,
        )
        call_s = await _call_time(client, decode.address)
        found = await sweep(meter, plan.within(described), lambda text: print(text, file=sys.stderr, flush=True))
        return replace(found, call_s=call_s)


async def _call_time(client: GrpcWorkerClient, address: str) -> float:
    """Returns the median time of a call that computes nothing."""
    times_s = []
    for _ in range(CALLS):
        began_s = time.perf_counter()
        await client.describe(address, timeout_s=CALL_TIMEOUT_S)
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)


def numbers(texts: Sequence[str], field: str) -> Sequence[int]:
    """In order. Raises InvalidRequestError that names the setting for anything but numbers above 0."""
    if not texts or not all(is_whole_number(text) and int(text) for text in texts):
        raise InvalidRequestError(
            f"{field} must be a list of numbers above 0, such as 64,256, not {','.join(texts)}", field=field
        )
    return sorted({int(text) for text in texts})


def _choose(instances: Sequence[Instance], worker_id: str) -> Instance:
    for each in sorted(instances, key=lambda each: each.instance_id):
        if each.takes_requests and worker_id in ("", each.instance_id):
            return each
    raise NotFoundError(
        f"no worker {worker_id or 'of this role'} takes requests", reason="worker_not_found", field="worker"
    )


def flags_of(profile: EngineProfile) -> str:
    """Arguments of `kvmesh up`: for a real engine, so that routers and planners know its speed, and for a simulated one that is as fast."""
    fit = profile.fit
    given = {each.name: value for each in fields(fit) if (value := getattr(fit, each.name)) is not None}
    worker = " ".join(f"--profile-{name.replace('_', '-')} {value:.6g}" for name, value in given.items())
    return f"--engine-args='{worker}'\n--engine simulated --engine-args='{simulated_flags(profile)}'"


def simulated_flags(profile: EngineProfile) -> str:
    """Times of a simulated engine.

    A simulated engine has no term for the context of decode steps, so they use the mean context. Measured prefill times include the call;
    a simulated worker is called too, so the time of a call is subtracted.
    """
    fit = profile.fit
    base_s = fit.decode_step_base_s or 0.0
    prefill_s = max(0.0, (fit.prefill_base_s or 0.0) - profile.call_s - base_s)
    request_s = (fit.decode_s_per_request or 0.0) + (fit.decode_s_per_kv_token or 0.0) * profile.context_tokens_mean
    times = {
        "base": base_s,
        "per-prefill-token": fit.prefill_s_per_token or 0.0,
        "per-token-pair": fit.prefill_s_per_token_pair or 0.0,
        "per-prefill-step" if profile.shares_steps else "per-prompt": prefill_s,
        "per-decode-request": request_s,
    }
    return " ".join(f"--simulated-profile-{name}-s {value:.6g}" for name, value in times.items())


def summary_of(profile: EngineProfile) -> str:
    """Returns the coefficients, and how well they fit."""
    fit = profile.fit
    lines = [f"{profile.engine} {profile.engine_version}, {profile.model}"]
    lines += [f"{each.name:<26} {value:.4g}" for each in fields(fit) if (value := getattr(fit, each.name)) is not None]
    for name, residuals in (("prefill", profile.prefill_residuals), ("decode", profile.decode_residuals)):
        if residuals is not None:
            lines.append(f"{name} fit: error {residuals.rms:.1%} (root mean square), at most {residuals.largest:.1%}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    return run_command(ProfileCommandSettings, argv, _profile, program="kvmesh profile", description=__doc__)


def _profile(settings: ProfileCommandSettings) -> int:
    try:
        if settings.show:
            profile = read_engine_profile(Path(settings.show).read_bytes(), field="show")
            print(flags_of(profile))
            _write_page(profile, settings.html)
            return 0
        profile = _dated(asyncio.run(measure(settings, settings.target())))
        _write_page(profile, settings.html)
        text = to_text(profile)
        print(summary_of(profile), file=sys.stderr)
        if settings.out:
            Path(settings.out).write_text(text)
        else:
            print(text, end="")
        return 0
    except (MeshError, OSError) as error:
        print(f"kvmesh profile: {error}", file=sys.stderr)
        return 1


def _write_page(profile: EngineProfile, path: str) -> None:
    if path:
        Path(path).write_text(page(profile, summary_of(profile)))


def _dated(profile: EngineProfile) -> EngineProfile:
    return replace(profile, measured_at=datetime.now(UTC).isoformat(timespec="seconds"))
