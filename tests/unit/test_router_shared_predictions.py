"""A prompt that one router placed and nobody has computed yet, as the other router believes it."""

from kvmesh.core import ReportKind
from services.router.core_settings import SyncSettings
from tests.unit.router_fleets import BLOCK, store_blocks
from tests.unit.router_replicas import GRACE_S, Routers

WORKERS = (*((f"p{i}", "prefill") for i in range(1, 5)), ("d1", "decode"))
PROMPT = tuple(range(1, 201))
TOKENS = BLOCK * len(PROMPT)


def pair(**options) -> Routers:
    routers = Routers("a", "b", workers=WORKERS, **options)
    routers.connect("a", "b")
    routers.sync()
    return routers


def place(routers: Routers, name: str, own: int, prompt=PROMPT) -> tuple[int, str, int]:
    """Asks, some time after the ask before, for the prompt and one block more: its number, who computes it, and what he is
    believed to have of it by then."""
    routers.advance(0.02)
    number, placement = routers.place(name, tokens=BLOCK * (len(prompt) + 1), hashes=(*prompt, 1000 + own))
    assert placement.prefill is not None
    return number, placement.prefill.worker_id, placement.cached_tokens


def believed(routers: Routers, name: str) -> int:
    return len(routers.cores[name].index.predicted)


def test_a_burst_of_equal_prompts_is_computed_where_it_began():
    """Whichever router is asked, once the first placement is told."""
    routers = pair()
    _, first, cached = place(routers, "a", 0)
    assert cached == 0
    routers.sync()
    for own in range(1, 6):
        _, worker, cached = place(routers, "ab"[own % 2], own)
        assert (worker, cached) == (first, TOKENS)
        routers.sync()


def test_what_is_not_told_yet_is_not_believed():
    """That is the bound: within an interval each router has a prompt computed once."""
    routers = pair()
    place(routers, "a", 0)
    assert [place(routers, "b", own)[2] for own in (1, 2)] == [0, TOKENS]


def test_the_belief_ends_with_the_workers_word():
    """The worker tells that it has the blocks: from then on they are known at both routers, and believed at none."""
    routers = pair()
    place(routers, "a", 0)
    routers.sync()
    assert believed(routers, "a") == believed(routers, "b") == 1
    for router in routers.cores.values():
        store_blocks(router.fleet.workers["p1"], (*PROMPT, 1000))
    assert believed(routers, "a") == believed(routers, "b") == 0


def test_the_belief_ends_with_the_request():
    """One that fails before its prompt is computed leaves nothing behind at the other router."""
    routers = pair()
    number, _, _ = place(routers, "a", 0)
    routers.sync()
    routers.report("a", number, ReportKind.FAILED)
    routers.sync()
    assert believed(routers, "a") == believed(routers, "b") == 0


def test_the_belief_ends_when_its_router_is_lost():
    """With its time, as the own ones do."""
    routers = pair()
    place(routers, "a", 0)
    routers.sync()
    routers.kill("a")
    routers.advance(GRACE_S + 1)
    place(routers, "b", 1, prompt=range(500, 520))
    assert believed(routers, "b") == 1


def test_what_is_computed_by_the_time_of_telling_is_not_told():
    """The worker tells of it, so it costs no bytes; nor does a prompt of which less than a block is missing."""
    routers = pair()
    number, worker, _ = place(routers, "a", 0)
    routers.report("a", number, ReportKind.PREFILLED)
    routers.sync()
    assert believed(routers, "b") == 0
    for router in routers.cores.values():
        store_blocks(router.fleet.workers[worker], (*PROMPT, 1000))
    routers.place("a", tokens=TOKENS + BLOCK, hashes=(*PROMPT, 1000))
    routers.sync()
    assert believed(routers, "b") == 0
    assert not any(reservation.block_hashes for reservation in routers.cores["b"].book)


def test_as_many_blocks_are_told_as_the_setting_says():
    """The first ones: the rest counts as not cached at the other router. 0: none."""
    routers = pair(settings=SyncSettings(blocks_max=180))
    _, first, _ = place(routers, "a", 0)
    routers.sync()
    _, worker, cached = place(routers, "b", 1)
    assert (worker, cached) == (first, 180 * BLOCK)
    routers = pair(settings=SyncSettings(blocks_max=0))
    place(routers, "a", 0)
    routers.sync()
    assert believed(routers, "b") == 0


def test_blocks_of_another_size_are_not_told():
    """Their names mean nothing on the worker."""
    routers = pair()
    routers.place("a", tokens=TOKENS, hashes=PROMPT, block_size_tokens=2 * BLOCK)
    routers.sync()
    assert believed(routers, "b") == 0
