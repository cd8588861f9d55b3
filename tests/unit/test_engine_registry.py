"""Requirements for the registration of every engine."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import kvmesh.engines
from kvmesh.cli.up_settings import DEMO_MODEL
from kvmesh.clock import SystemClock
from kvmesh.core import Role, SamplingParams
from kvmesh.engines import sampling_names
from kvmesh.engines.registry import ENGINES
from kvmesh.engines.sampling_names import (
    SAMPLING_NAMES,
    TRANSLATED,
    EngineName,
    Names,
    Refused,
    copied_arguments,
)
from kvmesh.errors import UnsupportedError
from kvmesh.settings import SettingsError, load
from kvmesh.worker.host import make_engine
from kvmesh.worker.settings import HostSettings
from tests.conformance.engine_cases import CASES


def settings(engine: str, *argv: str, **environ: str) -> HostSettings:
    return load(HostSettings, argv=("--model", str(DEMO_MODEL), "--engine", engine, *argv), environ=environ)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_flags_with_its_name(name: str) -> None:
    """The flags of an engine's settings have its name as prefix, except the settings that the worker sets."""
    engine = ENGINES[name]
    assert isinstance(settings(name).engine_settings, engine.settings_type)
    assert set(engine.set_by_host) <= {field.name for field in fields(engine.settings_type)}
    for hidden in engine.set_by_host:
        with pytest.raises(SettingsError, match="unknown"):
            settings(name, f"--{name}-{hidden.replace('_', '-')}", "1")


@pytest.mark.parametrize("name", ENGINES)
def test_the_lease_is_one_setting_for_all_engines(name: str) -> None:
    """Every engine takes its lease and its pull timeout from KVMESH_KV_LEASE_S and KVMESH_KV_PULL_TIMEOUT_S."""
    chosen = settings(name, KVMESH_KV_LEASE_S="7.5", KVMESH_KV_PULL_TIMEOUT_S="1.5")
    engine = make_engine(chosen, Role.PREFILL, SystemClock())
    own = getattr(engine, "settings", None) or engine._settings  # type: ignore[attr-defined]
    assert (own.lease_s, own.pull_timeout_s) == (7.5, 1.5)


def test_every_engine_runs_the_conformance_suite() -> None:
    """The support matrix calls features *verified* because the suite tests them on every engine."""
    assert {parameters.values[0].name for parameters in CASES} == set(ENGINES)


def test_a_pull_ends_before_its_lease() -> None:
    """A pull timeout that is not below the lease is refused, because a pull that times out would always have lost its lease."""
    with pytest.raises(SettingsError, match="pull_timeout_s must be below lease_s"):
        settings("simulated", KVMESH_KV_LEASE_S="5")


def test_every_sampling_parameter_has_a_row_of_names() -> None:
    """An adapter would silently ignore a parameter without a row. The simulated engine needs none because it has no probabilities."""
    assert SAMPLING_NAMES.keys() == {each.name for each in fields(SamplingParams)}
    assert {each.name for each in fields(Names)} == set(ENGINES) - {"simulated"} == set(get_args(EngineName))


@pytest.mark.parametrize("name", get_args(EngineName))
def test_an_adapter_names_every_parameter_that_it_translates(name: str) -> None:
    sources = (Path(kvmesh.engines.__path__[0]) / name).rglob("*.py")
    named = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    assert not {each for each, row in SAMPLING_NAMES.items() if getattr(row, name) is TRANSLATED} - named


def test_a_given_value_is_copied_under_the_engines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lacks the parameter refuses it by name. Parameters that the request does not set are neither copied nor refused."""
    copied = copied_arguments("sglang", SamplingParams(temperature=0.0, presence_penalty=0.5, top_k=3))
    assert copied == {"temperature": 0.0, "presence_penalty": 0.5, "ignore_eos": False}
    row = {"presence_penalty": Refused("this engine has no penalties")}
    monkeypatch.setitem(sampling_names._REFUSED, "sglang", row)  # type: ignore[misc]
    copied_arguments("sglang", SamplingParams(temperature=0.0))
    with pytest.raises(UnsupportedError, match="no penalties") as caught:
        copied_arguments("sglang", SamplingParams(presence_penalty=0.5))
    assert caught.value.field == "generation.sampling.presence_penalty"
