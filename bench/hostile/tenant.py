"""The well-behaved tenant and its measurements."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.figures import percentiles
from bench.hostile.attacks import CHAT
from bench.hostile.slow import Explain
from bench.mesh import Served
from bench.noise import busy_core_s, cpu_pressure_s
from bench.processes import process_use

TIMEOUT_S = 60.0
SLOW_MAX = 5
LAG, LAG_CPU = "kvmesh_frontend_event_loop_lag_seconds", "kvmesh_frontend_event_loop_lag_cpu_seconds"
Lag = dict[str, dict[float, float]]
"""By metric: how many delays exceeded each number of seconds."""


@dataclass(slots=True, kw_only=True)
class TenantReport:
    """What the well-behaved tenant measured, and the load of the machine meanwhile."""

    times_s: list[float] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)
    cores: dict[str, float] = field(default_factory=dict)
    """Cores that each service used."""
    lag: Lag = field(default_factory=dict)
    """Delays of the frontend's event loop, and the part of them that its own CPU time caused."""
    busy_cores: float = 0.0
    """Cores in use on the whole machine."""
    pressure: float = 0.0
    """Share of the time in which some process of the machine waited for a CPU."""
    failures: Counter[str] = field(default_factory=Counter)
    slow: list[tuple[float, str]] = field(default_factory=list)
    """The slowest requests: their duration, and a text with their send time and where they waited."""

    def is_slow(self, elapsed_s: float) -> bool:
        return len(self.slow) < SLOW_MAX or elapsed_s > self.slow[-1][0]

    def lines(self, name: str) -> str:
        """Returns the phase's three lines of the table."""
        found = percentiles(self.times_s)
        cells = (f"{found[each]:9.1f}" for each in ("p50", "p90", "p99"))
        failures = ", ".join(f"{count} x {what}" for what, count in self.failures.items()) or "none"
        cores = " ".join(f"{service} {used:.2f}" for service, used in self.cores.items())
        delays, work = (_above(self.lag.get(name, {})) for name in (LAG, LAG_CPU))
        return (
            f"{name:10} {len(self.times_s):8} {' '.join(cells)}   failures: {failures}\n"
            f"           cores: {cores} machine {self.busy_cores:.2f}; time in which a process waits for a CPU: {self.pressure:.0%}\n"
            f"           event-loop delays, ms: {delays}; due to its own work: {work}"
        )

    @property
    def p50_ms(self) -> float:
        return percentiles(self.times_s)["p50"]

    @property
    def p99_ms(self) -> float:
        return percentiles(self.times_s)["p99"]


async def run_tenant(served: Served, key: str, seconds: float, *, explain: Explain, period_s: float) -> TenantReport:
    """Sends a request every `period_s`, whether or not earlier ones have been answered."""
    experience = TenantReport()
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        lag = await _lag(session, served)
        began_s, used_s, busy_s, pressure_s = time.monotonic(), _used_s(served), busy_core_s(), cpu_pressure_s()
        async with asyncio.TaskGroup() as tasks:
            ends_s = time.monotonic() + seconds
            number = 0
            while time.monotonic() < ends_s:
                number += 1
                tasks.create_task(_ask(session, served, number, experience=experience, explain=explain))
                await asyncio.sleep(period_s)
        elapsed_s = time.monotonic() - began_s
        experience.busy_cores = (busy_core_s() - busy_s) / elapsed_s
        experience.pressure = (cpu_pressure_s() - pressure_s) / elapsed_s
        experience.cores = {name: (used - used_s[name]) / elapsed_s for name, used in _used_s(served).items()}
        experience.lag = {
            name: {above: count - lag[name][above] for above, count in counts.items()}
            for name, counts in (await _lag(session, served)).items()
        }
    return experience


def _used_s(served: Served) -> dict[str, float]:
    return {name: process_use(pid).cpu_s for name, pid in served.watch.items()}


def _above(counts: dict[float, float]) -> str:
    return " ".join(f"{count:.0f} > {1000 * above:g}" for above, count in counts.items() if count) or "none"


async def _lag(session: aiohttp.ClientSession, served: Served) -> Lag:
    async with session.get(f"{served.url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    found: Lag = {}
    for name in (LAG, LAG_CPU):
        samples = [each for family in families for each in family.samples if each.name == f"{name}_bucket"]
        below = {float(sample.labels["le"]): sample.value for sample in samples}
        found[name] = {above: below[float("inf")] - count for above, count in below.items() if above != float("inf")}
    return found


async def _ask(
    session: aiohttp.ClientSession, served: Served, number: int, *, experience: TenantReport, explain: Explain
) -> None:
    messages = [{"role": "user", "content": f"Question {number}: what is the sum of {number} and 7?"}]
    body = {"model": served.model, "messages": messages, "max_tokens": 16}
    began_s, request_id = time.perf_counter(), ""
    try:
        async with session.post(served.url + CHAT, json=body) as response:
            request_id = response.headers.get("x-kvmesh-request-id", "")
            await response.read()
            if response.status != 200:
                experience.failures[str(response.status)] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        experience.failures[type(error).__name__] += 1
    elapsed_s = time.perf_counter() - began_s
    experience.times_s.append(elapsed_s)
    if experience.is_slow(elapsed_s):
        line = f"at {began_s - experience.began_s:.1f} s, {1000 * elapsed_s:.0f} ms: {await explain(request_id)}"
        experience.slow = sorted([*experience.slow, (elapsed_s, line)], reverse=True)[:SLOW_MAX]


def combined(experiences: Sequence[TenantReport]) -> TenantReport:
    """Returns the times and failures of several phases as one."""
    whole = TenantReport()
    for each in experiences:
        whole.times_s += each.times_s
        whole.failures += each.failures
    return whole
