"""The simulation finds planted defects, and reports nothing without them."""

from functools import cache
from pathlib import Path

import pytest

from services.simulation.command import main
from services.simulation.play import Outcome
from tests.simulation.defects import CAMPAIGN, DEFECTS, SEEDS_MAX, planted, play_with

SEARCHED = range(40)
"""Seeds that CI tries if the seeds that found a defect before no longer do."""


@cache
def outcome_without_defect(seed: int) -> Outcome:
    return play_with(None, seed)


@pytest.mark.parametrize("name", [name for name, defect in DEFECTS.items() if defect.seeds])
def test_a_planted_defect_is_found(name: str) -> None:
    """Some seed fails with the defect and passes without it. `python -m tests.simulation.defects` checks the full statement of
    `docs/operate/reliability.md`."""
    defect = DEFECTS[name]
    assert all(seed < SEEDS_MAX for seed in defect.seeds)
    seeds = filter(defect.may_find, (*defect.seeds, *SEARCHED))
    found = next((seed for seed in seeds if play_with(defect, seed).problems), None)
    assert found is not None, f"python -m tests.simulation.defects --only {name}"
    assert not outcome_without_defect(found).problems


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_command_shows_a_failure(goes_on: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with status 1, prints the problem, and writes a file that replays it. It stops at the first failing seed, unless
    `--keep-going` is given."""
    file = tmp_path / "failure.json"
    mesh = CAMPAIGN.topology
    assert mesh is not None
    arguments = ["--prefill", str(mesh.prefill), "--decode", str(mesh.decode), "--routers", str(mesh.routers)]
    arguments += [
        "--frontends",
        str(mesh.frontends),
        "--requests",
        str(CAMPAIGN.requests),
        "--faults",
        str(CAMPAIGN.faults),
    ]
    arguments += ["--seeds", "3", "--jobs", "1", "--shrink", "0", "--file", str(file)]
    defect = DEFECTS["count-kept-without-router"]
    with planted(defect):
        assert main([*arguments, *(["--keep-going"] if goes_on else [])]) == 1
        printed = capsys.readouterr().out
        assert main(["--replay", str(file)]) == 1
    assert "counted that were placed without a router" in printed
    assert f"seeds     {3 if goes_on else defect.seeds[0] + 1}," in printed


def test_the_page_names_the_defects() -> None:
    """The documentation lists exactly the planted defects."""
    page = (Path(__file__).resolve().parents[2] / "docs/operate/reliability.md").read_text()
    assert [
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in DEFECTS
    ] == list(DEFECTS)
