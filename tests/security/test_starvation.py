"""A tenant that requests far more than its share does not make other tenants wait."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import mean

import pytest

from kvmesh.core import Placement, Report, ReportKind
from kvmesh.errors import OverloadedError
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings, SyncSettings
from services.router.queue.admission import Queued
from services.router.replicas.peer_reservations import PeerReservations
from tests.unit.router_fleets import ask, core, join

ROOM = 4
SERVICE_S = 0.3


@dataclass
class Tenant:
    """Keeps `width` requests in flight. `output` is the tokens of an answer, `service_s` its duration."""

    width: int
    prompt: int = 64
    output: int = 100
    choices: int = 1
    service_s: float = SERVICE_S
    kinds: int = 1
    """Number of request kinds. Each kind waits in its own subqueue for the same worker."""
    waits: list[float] = field(default_factory=list)
    ended: int = 0


class Mesh:
    """The router's core, one worker with room for ROOM requests, and tenants in closed loops, in virtual time.

    `is_fifo`: the router cannot distinguish the tenants.
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
            excluded_worker_ids=(f"none-{number % tenant.kinds}",) if tenant.kinds > 1 else (),
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
    """A tenant with one request, while another has 40, waits until a slot is free: far less than with first come, first served."""
    fair, fifo = (
        waits(is_fifo, Tenant(width=1, prompt=prompt), Tenant(width=40, prompt=flood_prompt))
        for is_fifo in (False, True)
    )
    assert mean(fifo) > 5 * SERVICE_S
    # A request that costs more than the other tenant's is above its share, so its tenant then waits longer.
    if prompt <= flood_prompt:
        assert max(fair) <= SERVICE_S + 1e-6
        assert mean(fair) < mean(fifo) / 5
    assert mean(fair) <= mean(fifo)


def test_output_is_charged_when_it_is_known() -> None:
    """Two tenants with equally many requests, one of which generates ten times as many tokens, each get half of the capacity."""
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
    """A full queue removes a request of the tenant that uses most of it, by requests or by tokens."""
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


def test_requests_of_many_kinds_get_no_more_than_those_of_one() -> None:
    """A tenant has one account for all subqueues, whether its requests differ in adapters, labels, pins or exclusions."""
    spread, plain = Tenant(width=32, kinds=16), Tenant(width=32)
    Mesh({"spread": spread, "plain": plain}).run(30.0)
    assert 0.8 < spread.ended / plain.ended < 1.25


def test_a_lone_tenant_waits_for_one_service_beside_a_flood_of_many_kinds() -> None:
    """The single tenant is served next although the other tenant has older requests of all kinds."""
    lone, flood = Tenant(width=1), Tenant(width=48, kinds=16)
    Mesh({"flood": flood, "lone": lone}).run(25.0)
    assert max(lone.waits) <= SERVICE_S + 1e-6


def test_one_tenant_does_not_take_all_subqueues() -> None:
    """A tenant with ever new kinds of requests is refused before another tenant's first kind is."""
    router = Mesh({}, subqueues_max=16).router
    outcomes: list[str] = []
    for number in range(1, 41):
        wanted = ask(str(number), (), tokens=64, tenant="many", excluded_worker_ids=(f"none-{number}",))
        try:
            outcomes.append(type(router.ask("f", number, wanted, now=0.0, wall=0.0)).__name__)
        except OverloadedError as error:
            outcomes.append(error.reason)
    assert outcomes == ["Placement"] * ROOM + ["Queued"] * 4 + ["queue_full"] * (36 - ROOM)
    assert isinstance(router.ask("f", 99, ask("99", (), tokens=64, tenant="other"), now=0.0, wall=0.0), Queued)


def test_a_waiting_tenant_cannot_take_free_capacity_with_another_kind_of_request() -> None:
    """A tenant that waits cannot use a request of another kind to take a slot that has just become free, before the queue is drained."""
    router = Mesh({}).router

    def send(number: int, tenant: str, *excluded: str) -> object:
        wanted = ask(str(number), (), tokens=64, tenant=tenant, excluded_worker_ids=excluded)
        return router.ask("f", number, wanted, now=0.0, wall=0.0)

    for number in range(1, ROOM + 1):
        assert isinstance(send(number, "flood"), Placement)
    assert isinstance(send(10, "flood"), Queued)
    assert isinstance(send(11, "lone"), Queued)
    assert isinstance(send(12, "flood"), Queued)
    report = Report(kind=ReportKind.FINISHED, elapsed_s=0.1, output_tokens=5)
    router.report("f", 1, report, now=0.0)
    assert [each.ask_id for each in router.drain_queue(now=0.0, wall=0.0)] == [10]
    router.report("f", 2, report, now=0.0)
    answer = send(13, "flood", "none-1")
    assert isinstance(answer, Queued)
    assert answer.may_have_room
    assert [each.ask_id for each in router.drain_queue(now=0.0, wall=0.0)] == [11]
    router.report("f", 3, report, now=0.0)
    assert isinstance(send(14, "newcomer", "none-2"), Placement)


def test_a_single_tenant_does_not_wait_for_its_own_queue() -> None:
    """If no other tenant waits, free capacity goes to a request that can use it at once."""
    router = Mesh({}).router

    def send(number: int, *excluded: str) -> object:
        wanted = ask(str(number), (), tokens=64, tenant="only", excluded_worker_ids=excluded)
        return router.ask("f", number, wanted, now=0.0, wall=0.0)

    report = Report(kind=ReportKind.FINISHED, elapsed_s=0.1, output_tokens=5)
    answers = [send(number) for number in range(1, ROOM + 3)]
    router.report("f", 1, report, now=0.0)
    router.drain_queue(now=0.0, wall=0.0)
    router.report("f", 2, report, now=0.0)
    assert [type(each) for each in answers] == [Placement] * ROOM + [Queued] * 2
    assert isinstance(send(20, "none-1"), Placement)


def test_a_tenant_gets_no_more_through_two_routers() -> None:
    """A placement by one router counts at the router where the tenant has requests waiting."""
    one, two = (
        core(router_id=name, run_id="run", requests_per_decode_max=ROOM, queue=QueueSettings()) for name in ("1", "2")
    )
    for router in (one, two):
        join(router, "d1", "decode")
    for number in range(1, ROOM + 1):
        one.ask("f", number, ask(str(number), (), tokens=64, tenant="other"), now=0.0, wall=0.0)
    for number, tenant in enumerate(("both", "plain", "both", "plain"), start=10):
        one.ask("f", number, ask(str(number), (), tokens=64, tenant=tenant), now=0.0, wall=0.0)
    placed = two.ask("g", 1, ask("elsewhere", (), tokens=64, tenant="both"), now=0.0, wall=0.0)
    assert isinstance(placed, Placement)
    to_two, to_one = (PeerReservations(router, SyncSettings()) for router in (one, two))
    sending, receiving = to_one.open_session(), to_two.open_session()
    to_two.on_message(receiving, to_one.next_message(sending, now=0.0), now=0.0)
    report = Report(kind=ReportKind.FINISHED, elapsed_s=0.1, output_tokens=5)
    for number in range(1, ROOM + 1):
        one.report("f", number, report, now=0.0)
    assert [each.ask.tenant for each in one.drain_queue(now=0.0, wall=0.0)][:2] == ["plain", "both"]
