"""What every engine's registration must give."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import kvmesh.engines
from kvmesh.cli.up_settings import DEMO_MODEL
from kvmesh.clock import SystemClock
from kvmesh.core import Role
from kvmesh.core.sampling import RANGES
from kvmesh.engines.registry import ENGINES
from kvmesh.settings import SettingsError, load
from kvmesh.worker.host import make_engine
from kvmesh.worker.settings import HostSettings
from tests.conformance.engine_cases import CASES


def settings(engine: str, *argv: str, **environ: str) -> HostSettings:
    return load(HostSettings, argv=("--model", str(DEMO_MODEL), "--engine", engine, *argv), environ=environ)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_flags_of_its_own(name: str) -> None:
    """Its settings stand under its name, those that the worker sets excepted."""
    engine = ENGINES[name]
    assert isinstance(settings(name).engine_settings, engine.settings_type)
    assert set(engine.set_by_host) <= {field.name for field in fields(engine.settings_type)}
    for hidden in engine.set_by_host:
        with pytest.raises(SettingsError, match="unknown"):
            settings(name, f"--{name}-{hidden.replace('_', '-')}", "1")


@pytest.mark.parametrize("name", ENGINES)
def test_the_lease_is_one_setting(name: str) -> None:
    """Every engine holds handed-out blocks for KVMESH_KV_LEASE_S."""
    chosen = settings(name, KVMESH_KV_LEASE_S="7.5", KVMESH_KV_PULL_TIMEOUT_S="1.5")
    engine = make_engine(chosen, Role.PREFILL, SystemClock())
    own = getattr(engine, "settings", None) or engine._settings  # type: ignore[attr-defined]
    assert (own.lease_s, own.pull_timeout_s) == (7.5, 1.5)


def test_every_engine_runs_the_conformance_suite() -> None:
    """The support matrix calls features *verified* because of it."""
    assert {parameters.values[0].name for parameters in CASES} == set(ENGINES)


def test_a_pull_ends_before_its_lease() -> None:
    """Otherwise every pull that is given up would have lost its lease."""
    with pytest.raises(SettingsError, match="pull_timeout_s must be below lease_s"):
        settings("simulated", KVMESH_KV_LEASE_S="5")


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "simulated"])
def test_an_engine_translates_or_refuses_every_number_of_a_request(name: str) -> None:
    """A parameter that the adapter does not name would be ignored without a word. The simulated engine has no probabilities."""
    sources = (Path(kvmesh.engines.__path__[0]) / name).rglob("*.py")
    named = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    assert not RANGES.keys() - named
