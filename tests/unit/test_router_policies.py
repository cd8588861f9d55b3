"""Policies other than the default one, and policies of other packages."""

import re
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest

from bench.policies.dynamo_cost import DynamoCostPolicy
from kvmesh.errors import InvalidRequestError
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.explain import scored_candidates
from services.router.placement.policies import GROUP, POLICIES, PolicyContext, make_policy
from services.router.workers.cost_settings import CostSettings
from tests.unit.router_fleets import ask, core, join, store_blocks

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = PolicyContext(cost=CostSettings(), generator=Random(1))


def fleet(policy: str, decodes: int = 4, **options) -> RouterCore:
    router = core(policy=policy, **options)
    for i in range(decodes):
        join(router, f"d{i}", "decode")
    return router


def decode_of(router: RouterCore, number: int, **options) -> str:
    name = options.pop("name", f"r{number}")
    return router.ask("f", number, ask(name, [number], **options), now=0.0, wall=0.0).decode.worker_id


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "pinned"])
def test_every_policy_places_and_explains(name):
    """Each policy places a pair, sets its reason, and explains its cost with terms that add up."""
    router = fleet(name)
    join(router, "p0", "prefill")
    placement = router.ask("f", 1, ask("r1", [1, 2]), now=0.0, wall=0.0)
    assert placement.prefill is not None and placement.prefill.worker_id == "p0"
    assert placement.reasons == (("least_loaded",) if name == "kv" else (name,))
    assert (placement.expected_ttft_s is not None) == (name == "kv")
    choice = router.history.get("r1").decision
    for candidate in scored_candidates(choice):
        assert sum(value for _, value in candidate.terms) == pytest.approx(candidate.cost)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_documented(name):
    """The help of the setting and the page about policies name each policy."""
    help_text = next(field.metadata["help"] for field in fields(CoreSettings) if field.name == "policy")
    assert re.search(rf"\b{name}\b", help_text)
    assert f"`{name}`" in (ROOT / "docs/understand/routing-cost.md").read_text()


def test_power_of_two_takes_the_less_loaded_of_two():
    """It uses all workers over time, and about evenly."""
    router = fleet("power_of_two", decodes=3)
    placed = Counter(decode_of(router, number) for number in range(1, 61))
    assert set(placed) == {"d0", "d1", "d2"}
    assert max(placed.values()) - min(placed.values()) <= 2


def test_a_session_sticks_to_its_worker_under_consistent_hashing():
    """When a worker leaves, only its sessions move to other workers."""
    router = fleet("consistent_hash")
    sessions = [f"session-{i}" for i in range(80)]
    before = {s: decode_of(router, i, session_id=s) for i, s in enumerate(sessions, 1)}
    assert set(before.values()) == {"d0", "d1", "d2", "d3"}
    assert before == {s: decode_of(router, 100 + i, session_id=s) for i, s in enumerate(sessions)}
    router.fleet.unregister("d2")
    after = {s: decode_of(router, 200 + i, session_id=s) for i, s in enumerate(sessions)}
    assert all(after[s] == before[s] for s in sessions if before[s] != "d2")
    assert {after[s] for s in sessions if before[s] == "d2"} == {"d0", "d1", "d3"}


def test_without_a_session_the_first_block_decides():
    """Prompts with the same first block are placed on the same worker."""
    router = fleet("consistent_hash")
    assert len({decode_of(router, n, name=f"r{n}") for n in range(1, 20)}) > 1
    placed = {router.ask("g", n, ask(f"g{n}", [7, n]), now=0.0, wall=0.0).decode.worker_id for n in range(1, 20)}
    assert len(placed) == 1


def test_every_policy_skips_full_workers():
    """The limits of workers hold under every policy."""
    for name in POLICIES.keys() - {"pinned"}:
        router = fleet(name, decodes=2, requests_per_decode_max=3)
        placed = Counter(decode_of(router, number, session_id="s") for number in range(1, 7))
        assert placed == {"d0": 3, "d1": 3}


def test_the_pinned_policy_needs_a_pin():
    """This policy is for tests. It refuses an ask without a pin and names the field."""
    router = fleet("pinned")
    assert decode_of(router, 1, pinned_decode_worker_id="d3") == "d3"
    with pytest.raises(InvalidRequestError) as refusal:
        decode_of(router, 2)
    assert refusal.value.field == "pinned_decode_worker_id"


def test_a_policy_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    """A module with a subclass of Policy and an entry point is sufficient. An entry point that is not a policy is refused."""
    (tmp_path / "last_named.py").write_text(
        "import numpy as np\n"
        "from services.router.placement.policies import Policy\n"
        "class LastNamed(Policy):\n"
        "    name = 'last_named'\n"
        "    def terms(self, candidates):\n"
        "        return {'place': -np.arange(len(candidates.targets), dtype=float)}\n"
    )
    metadata = tmp_path / "last_named-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: last-named\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[{GROUP}]\nlast_named = last_named:LastNamed\nbroken = last_named:np\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    router = fleet("last_named")
    assert [decode_of(router, number) for number in (1, 2)] == ["d3", "d3"]
    assert router.ask("f", 3, ask("r3", [1]), now=0.0, wall=0.0).reasons == ("no_prefill_pool", "last_named")
    with pytest.raises(InvalidRequestError, match="not a subclass"):
        make_policy("broken", CONTEXT)
    del sys.modules["last_named"]


def test_the_dynamo_cost_function():
    """The policy for comparisons weighs blocks to compute and cached blocks as Dynamo's router does."""
    router = core(policy=DynamoCostPolicy)
    for name in ("p1", "p2"):
        join(router, name, "prefill")
    for name in ("d1", "d2"):
        join(router, name, "decode")
    store_blocks(router.fleet.workers["p1"], [1, 2, 3])
    placement = router.ask("f", 1, ask("r1", [1, 2, 3, 4]), now=0.0, wall=0.0)
    assert (placement.prefill.worker_id, placement.cached_tokens) == ("p1", 48)
    choice = router.history.get("r1").decision
    costs = {(each.prefill.worker_id, each.decode.worker_id): each.cost for each in choice.candidates()}
    assert costs["p1", "d1"] == (4 - 3) + 4 + 4
    assert costs["p2", "d1"] == 4 + 4 + 4
    other = "d2" if placement.decode.worker_id == "d1" else "d1"
    assert router.ask("f", 2, ask("r2", [7, 8]), now=0.0, wall=0.0).decode.worker_id == other


def test_an_unknown_policy_is_refused_with_the_known_ones():
    """The error lists the known policies and names the setting."""
    with pytest.raises(InvalidRequestError, match=r"known policies: .*kv, ") as refusal:
        make_policy("kw", CONTEXT)
    assert refusal.value.field == "policy"
