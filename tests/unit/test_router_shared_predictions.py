"""Blocks of a prompt that one router has placed and no worker has computed yet, as predicted by the other router."""

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
    """Asks for the prompt plus one block, some time after the previous ask. Returns its number, its prefill worker and its expected cached
    tokens."""
    routers.advance(0.02)
    number, placement = routers.place(name, tokens=BLOCK * (len(prompt) + 1), hashes=(*prompt, 1000 + own))
    assert placement.prefill is not None
    return number, placement.prefill.worker_id, placement.cached_tokens


def predicted(routers: Routers, name: str) -> int:
    return len(routers.cores[name].index.predicted)


def test_equal_prompts_of_a_burst_share_a_prefill_worker():
    """After the first placement is synchronised, both routers place equal prompts on the same prefill worker."""
    routers = pair()
    _, first, cached = place(routers, "a", 0)
    assert cached == 0
    routers.sync()
    for own in range(1, 6):
        _, worker, cached = place(routers, "ab"[own % 2], own)
        assert (worker, cached) == (first, TOKENS)
        routers.sync()


def test_unsynchronised_placements_are_not_predicted():
    """Until the next synchronisation each router may have a prompt computed once."""
    routers = pair()
    place(routers, "a", 0)
    assert [place(routers, "b", own)[2] for own in (1, 2)] == [0, TOKENS]


def test_a_prediction_ends_with_the_workers_event():
    """When the worker reports the blocks, they are known at both routers and no longer predicted."""
    routers = pair()
    place(routers, "a", 0)
    routers.sync()
    assert predicted(routers, "a") == predicted(routers, "b") == 1
    for router in routers.cores.values():
        store_blocks(router.fleet.workers["p1"], (*PROMPT, 1000))
    assert predicted(routers, "a") == predicted(routers, "b") == 0


def test_a_prediction_ends_with_the_request():
    """A request that fails before its prompt is computed leaves no prediction at the other router."""
    routers = pair()
    number, _, _ = place(routers, "a", 0)
    routers.sync()
    routers.report("a", number, ReportKind.FAILED)
    routers.sync()
    assert predicted(routers, "a") == predicted(routers, "b") == 0


def test_a_prediction_of_a_lost_router_expires():
    """Predictions from a peer expire like those of the router itself."""
    routers = pair()
    place(routers, "a", 0)
    routers.sync()
    routers.kill("a")
    routers.advance(GRACE_S + 1)
    place(routers, "b", 1, prompt=range(500, 520))
    assert predicted(routers, "b") == 1


def test_computed_blocks_are_not_sent():
    """Blocks are sent neither for a prompt that is already computed nor for one that is cached except for less than a block."""
    routers = pair()
    number, worker, _ = place(routers, "a", 0)
    routers.report("a", number, ReportKind.PREFILLED)
    routers.sync()
    assert predicted(routers, "b") == 0
    for router in routers.cores.values():
        store_blocks(router.fleet.workers[worker], (*PROMPT, 1000))
    routers.place("a", tokens=TOKENS + BLOCK, hashes=(*PROMPT, 1000))
    routers.sync()
    assert predicted(routers, "b") == 0
    assert not any(reservation.block_hashes for reservation in routers.cores["b"].book)


def test_the_number_of_sent_blocks_is_bounded():
    """Only the first `blocks_max` blocks are sent, and the rest counts as not cached at the other router. 0 sends none."""
    routers = pair(settings=SyncSettings(blocks_max=180))
    _, first, _ = place(routers, "a", 0)
    routers.sync()
    _, worker, cached = place(routers, "b", 1)
    assert (worker, cached) == (first, 180 * BLOCK)
    routers = pair(settings=SyncSettings(blocks_max=0))
    place(routers, "a", 0)
    routers.sync()
    assert predicted(routers, "b") == 0


def test_blocks_of_another_size_are_not_sent():
    """Their hashes do not match those of the worker."""
    routers = pair()
    routers.place("a", tokens=TOKENS, hashes=PROMPT, block_size_tokens=2 * BLOCK)
    routers.sync()
    assert predicted(routers, "b") == 0
