"""The arguments that `kvmesh up` passes to its processes, and how commands end."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli.plan import MeshInputs, MeshPlan, plan_mesh
from kvmesh.cli.up_settings import UpSettings, model_problem
from kvmesh.errors import InvalidRequestError
from kvmesh.lifecycle.process import run_process
from kvmesh.settings import load

REGISTRY = "http://127.0.0.1:1"
SETTINGS = UpSettings(engine="simulated", decode=2, routers=2, gateway=False, policy="emptiest_cache")


def planned(settings: UpSettings) -> MeshPlan:
    return plan_mesh(MeshInputs(settings=settings, registry=REGISTRY))


def test_flags_reach_only_their_services() -> None:
    """Flags for a kind of service reach every service of the kind, and no other."""
    plan = planned(replace(SETTINGS, engine_args="--e 1", router_args="--r 2", frontend_args="--f 3"))
    for specs, flags in ((plan.workers, ("--e", "1")), (plan.routers, ("--r", "2"))):
        assert len(specs) > 1
        assert all(tuple(spec.argv[-2:]) == flags for spec in specs)
    assert [tuple(spec.argv[-2:]) for spec in plan.frontends] == [("--f", "3")]
    assert not {"--e", "--r", "--f"} & {flag for spec in plan.planners for flag in spec.argv}


def test_one_frontend_and_one_router_are_one_process() -> None:
    """One process gets the flags of both services, separated by `--`. Several frontends or routers, or a setting, make separate processes."""
    settings = replace(SETTINGS, routers=1, gateway=True, router_args="--r 2", frontend_args="--f 3")
    plan = planned(settings)
    assert plan.routers == []
    (gateway,) = plan.frontends
    assert gateway.module == "services.gateway"
    at = gateway.argv.index("--")
    for flags in (gateway.argv[:at], gateway.argv[at + 1 :]):
        assert flags[flags.index("--discovery-address") + 1] == REGISTRY
    assert gateway.argv[at - 2 : at] == ("--f", "3")
    assert gateway.argv[-2:] == ("--r", "2")
    for other in (
        replace(settings, routers=2),
        replace(settings, frontend_processes=2),
        replace(settings, gateway=False),
    ):
        modules = [spec.module for spec in (*planned(other).routers, *planned(other).frontends)]
        assert modules == ["services.router"] * other.routers + ["services.frontend"]


def test_a_mesh_may_have_no_planner() -> None:
    """A mesh without a planner has the same other services."""
    plan = planned(replace(SETTINGS, planner=False))
    assert not plan.planners
    assert plan.frontends == planned(SETTINGS).frontends


def test_any_policy_name_is_accepted() -> None:
    """Only the router knows the policies of other packages, so `kvmesh up` does not check the name."""
    settings = load(UpSettings, program="kvmesh up", argv=["--policy", "emptiest_cache"], environ={})
    assert settings.policy == "emptiest_cache"
    for spec in planned(SETTINGS).routers:
        assert spec.argv[spec.argv.index("--policy") + 1] == "emptiest_cache"


def test_a_command_whose_reader_ends_early_exits_without_a_traceback() -> None:
    """`kvmesh status | head` is not an error. The exit status is the one that shells report for SIGPIPE."""
    code = (
        "import sys; from kvmesh.cli import __main__ as cli, key\n"
        "key.main = lambda words: print('line\\n' * 100_000) or 0\n"
        "sys.exit(cli.main(['key']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        words = process.stderr.read()
    assert (process.returncode, words) == (141, b"")


@pytest.fixture
def collector() -> Iterator[None]:
    """Restores the state of the garbage collector. Native libraries report objects that are frozen at exit as leaks."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("collector")
def test_the_error_that_ends_a_process_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that fails prints its error once, with the cause if it has one."""

    async def refuse() -> None:
        raise InvalidRequestError("no policy is named 'x'", field="policy")

    async def fail() -> None:
        raise InvalidRequestError("it cannot start") from OSError("no room")

    assert run_process(refuse) == 1
    assert capsys.readouterr().err == "no policy is named 'x'\n"
    assert run_process(fail) == 1
    assert capsys.readouterr().err == "it cannot start: no room\n"


def test_a_directory_without_a_model_is_reported_with_its_missing_files(tmp_path: Path) -> None:
    """One message names all missing files of a model."""
    assert model_problem(str(tmp_path)).endswith(": config.json and tokenizer.json are missing")
    (tmp_path / "config.json").touch()
    assert model_problem(str(tmp_path)).endswith(": tokenizer.json is missing")


def test_a_link_to_a_model_keeps_its_name(tmp_path: Path) -> None:
    """A worker on another host with the same path serves the model under the same name."""
    (tmp_path / "3f1c9a").mkdir()
    link = tmp_path / "my-llama"
    link.symlink_to("3f1c9a")
    settings = load(UpSettings, argv=["--model", str(link)], environ={}, program="kvmesh up")
    assert settings.model_path == link
