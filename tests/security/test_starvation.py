"""One tenant that asks for far more than its share does not make the others wait."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import mean

import pytest

from kvmesh.core import Placement, Report, ReportKind
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from tests.unit.router_fleets import ask, core, join

ROOM = 4
SERVICE_S = 0.3


@dataclass
class Tenant:
    """Has `width` requests at a time; sends the next when one ends. `output`: tokens of an answer. `service_s`: its duration."""

    width: int
    prompt: int = 64
    output: int = 100
    choices: int = 1
    service_s: float = SERVICE_S
    waits: list[float] = field(default_factory=list)
    ended: int = 0


class Mesh:
    """The router's core, one worker with room for ROOM requests, and tenants in closed loops, on a clock of its own.

    `is_fifo`: the router cannot tell the tenants apart.
    """

    def __init__(self, tenants: dict[str, Tenant], *, is_fifo: bool = False, **queue: object) -> None:
        self.tenants = tenants
        self.is_fifo = is_fifo
        self.router: RouterCore = core(requests_per_decode_max=ROOM, queue=QueueSettings(wait_s_max=1e6, **queue))
        join(self.router, "d1", "decode")
        self.now = 0.0
        self.number = 0
        self.asked: dict[int, tuple[str, float]] = {}
        self.running: list[tuple[float, int]] = []

    def run(self, until_s: float) -> "Mesh":
        for name, tenant in self.tenants.items():
            for _ in range(tenant.width):
                self.send(name)
        while self.running and self.running[0][0] < until_s:
            self.now, number = heappop(self.running)
            name, _ = self.asked.pop(number)
            tenant = self.tenants[name]
            tenant.ended += 1
            output = tenant.output * tenant.choices
            report = Report(kind=ReportKind.FINISHED, elapsed_s=tenant.service_s, output_tokens=output)
            assert self.router.report("f", number, report, now=self.now)
            for outcome in self.router.drain_queue(now=self.now, wall=self.now):
                assert isinstance(outcome.outcome, Placement)
                self.place(outcome.ask_id)
            self.send(name)
        return self

    def send(self, name: str) -> None:
        self.number += 1
        number, tenant = self.number, self.tenants[name]
        self.asked[number] = (name, self.now)
        request = ask(
            str(number),
            (),
            tokens=tenant.prompt,
            tenant="" if self.is_fifo else name,
            choices=tenant.choices,
            expected_output_tokens=1000,
        )
        if isinstance(self.router.ask("f", number, request, now=self.now, wall=self.now), Placement):
            self.place(number)

    def place(self, number: int) -> None:
        name, asked_s = self.asked[number]
        tenant = self.tenants[name]
        tenant.waits.append(self.now - asked_s)
        heappush(self.running, (self.now + tenant.service_s, number))


def waits(is_fifo: bool, lone: Tenant, flood: Tenant) -> list[float]:
    Mesh({"flood": flood, "lone": lone}, is_fifo=is_fifo).run(25.0)
    return lone.waits


@pytest.mark.parametrize("prompt", [1, 64, 5000])
@pytest.mark.parametrize("flood_prompt", [1, 64, 5000])
def test_a_lone_tenant_waits_for_one_service_and_not_for_the_flood(prompt: int, flood_prompt: int) -> None:
    """40 wide against one: the lone one waits until a place is free, and far less than first come, first served."""
    fair, fifo = (
        waits(is_fifo, Tenant(width=1, prompt=prompt), Tenant(width=40, prompt=flood_prompt))
        for is_fifo in (False, True)
    )
    assert mean(fifo) > 5 * SERVICE_S
    # A request that costs more than the others' is more than a share: its tenant then waits for what it was ahead.
    if prompt <= flood_prompt:
        assert max(fair) <= SERVICE_S + 1e-6
        assert mean(fair) < mean(fifo) / 5
    assert mean(fair) <= mean(fifo)


def test_output_is_charged_when_it_is_known() -> None:
    """Two tenants as wide as each other; one generates ten times as much: it gets a fraction of the requests, and of the room half."""
    long = Tenant(width=20, output=900, service_s=10 * SERVICE_S)
    short = Tenant(width=20, output=90)
    Mesh({"long": long, "short": short}).run(200.0)
    room_of_long, room_of_short = long.ended * long.service_s, short.ended * short.service_s
    assert 0.8 < room_of_long / room_of_short < 1.25


def test_choices_are_charged() -> None:
    """Eight choices of a request count as eight answers."""
    many, one = Tenant(width=20, choices=8), Tenant(width=20)
    Mesh({"many": many, "one": one}).run(80.0)
    assert 6 < one.ended / many.ended < 10


def test_many_small_requests_do_not_displace_one_long_one() -> None:
    """A full queue makes room at the tenant that takes most of it, by requests or by tokens."""
    flood, lone = Tenant(width=60, prompt=1), Tenant(width=1, prompt=5000)
    mesh = Mesh({"flood": flood}, requests_max=50)
    queue: deque[int] = deque()
    refused: defaultdict[str, int] = defaultdict(int)
    for tenant, count in (("flood", 54), ("lone", 1)):
        for _ in range(count):
            mesh.number += 1
            queue.append(mesh.number)
            prompt = lone.prompt if tenant == "lone" else flood.prompt
            mesh.router.ask(
                "f", mesh.number, ask(str(mesh.number), (), tokens=prompt, tenant=tenant), now=0.0, wall=0.0
            )
    for outcome in mesh.router.drain_queue(now=0.0, wall=0.0):
        refused[outcome.ask.tenant] += 1
    assert refused == {"flood": 1}
