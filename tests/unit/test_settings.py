"""Settings are loaded from flags, variables, a file and defaults, and all problems are reported at once."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kvmesh.settings import SettingsError, group, help_text, load, load_or_exit, required, setting, split_operands
from kvmesh.settings.declare import specs
from kvmesh.settings.show import default_text


class Policy(StrEnum):
    KV = "kv"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "Port; 0: a free one.", min=0, max=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    model: str = required("Model.")
    lease_s: float = setting(30.0, "Lease.", min=0.1, max=3600)
    is_eager: bool = setting(True, "Whether.")
    policy: Policy = setting(Policy.KV, "Policy.")
    peers: tuple[str, ...] = setting((), "Peers.")
    seed: int | None = setting(None, "Seed.")
    token: str = setting("", "Token.", secret=True)
    listen: ListenSettings = field(default_factory=lambda: ListenSettings(port=7001))

    def __post_init__(self) -> None:
        if self.policy is Policy.RANDOM and self.seed is None:
            raise ValueError("policy random needs a seed")


def router(*argv: str, **environ: str) -> RouterSettings:
    return load(RouterSettings, argv=["--model", "m", *argv], environ=environ)


def problems(*argv: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(RouterSettings, argv=argv, environ=environ)
    return caught.value.problems


def test_defaults_of_settings_and_groups() -> None:
    """Without input all settings have their defaults, including those that a component overrides for a shared group."""
    assert router() == RouterSettings(model="m", listen=ListenSettings(port=7001))


def test_precedence_of_sources(tmp_path: Path) -> None:
    """For each setting a flag overrides a variable, and a variable overrides the file."""
    file = tmp_path / "mesh.toml"
    file.write_text('lease_s = 1\nmodel = "file"\npeers = ["a", "b"]\n[listen]\nport = 1\nhost = "file"\n')
    environ = {"KVMESH_LEASE_S": "2", "KVMESH_LISTEN_PORT": "2", "KVMESH_CONFIG": str(file)}
    settings = load(RouterSettings, argv=["--listen-port=3"], environ=environ)
    assert settings == RouterSettings(
        model="file", lease_s=2.0, peers=("a", "b"), listen=ListenSettings(host="file", port=3)
    )


def test_every_type_as_a_flag() -> None:
    """Each type can be given as a flag. A negative number is a value and not a flag."""
    settings = router(
        "--no-is-eager", "--policy", "random", "--peers", "a,b", "--peers", "c", "--seed", "-5", "--lease-s", "0.5"
    )
    assert (settings.is_eager, settings.policy, settings.peers) == (False, Policy.RANDOM, ("a", "b", "c"))
    assert (settings.seed, settings.lease_s) == (-5, 0.5)


def test_an_empty_optional_setting_is_none() -> None:
    """An empty variable sets an optional setting to None."""
    assert router(KVMESH_SEED="").seed is None


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """One run reports all problems, with the flag, variable or key that the user wrote."""
    file = tmp_path / "bad.toml"
    file.write_text('lease_s = "soon"\nlisten = 5\nleases = 1\nseed = true\n')
    found = problems(
        "--listen-port", "70000", "--polcy", "kv", "--is-eager=maybe", "stray", "--config", str(file),
        KVMESH_POLICY="best", KVMESH_LEASE_S="nan", KVMESH_TOKN="x",
    )  # fmt: skip
    text = "\n".join(found)
    for words in (
        "--listen-port must be at most 65535, not 70000",
        "--polcy is unknown; did you mean --policy?",
        "--is-eager must be true or false",
        "stray is no flag",
        "KVMESH_POLICY must be one of kv, random, not 'best'",
        "KVMESH_LEASE_S must be a finite number",
        "KVMESH_TOKN is unknown; did you mean KVMESH_TOKEN?",
        "bad.toml: lease_s must be a number, not 'soon'",
        "bad.toml: listen must be a table",
        "bad.toml: leases is unknown; did you mean lease_s?",
        "bad.toml: seed must be an integer, not True",
        "--model (KVMESH_MODEL, model in the file) is required",
    ):
        assert words in text
    assert len(found) == 12


def test_a_check_of_the_dataclass_is_reported() -> None:
    """Constraints between settings are checked by the dataclass and reported like other problems."""
    assert problems("--model", "m", "--policy", "random") == ("settings: policy random needs a seed",)


def test_a_variable_of_another_component_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    """One environment may serve several components, so a variable that is unlike any known name is not an error."""
    with caplog.at_level(logging.WARNING):
        router(KVMESH_ENGINE_PROFILE="x", KVMESH_PLANNER="y", PATH="/bin")
    assert "KVMESH_ENGINE_PROFILE KVMESH_PLANNER" in caplog.text
    caplog.clear()
    load(
        RouterSettings,
        argv=["--model", "m"],
        environ={"KVMESH_X": "1", "KVMESH_PARENT_PID": "7"},
        foreign_variables=["KVMESH_X"],
    )
    assert not caplog.text


def test_a_secret_of_a_wrong_type_is_not_shown(tmp_path: Path) -> None:
    """A token that TOML reads as a number does not appear in the error."""
    file = tmp_path / "mesh.toml"
    file.write_text('model = "m"\ntoken = 271828\n')
    [problem] = problems("--config", str(file))
    assert "token" in problem
    assert "271828" not in problem


@pytest.mark.parametrize(("lease_s", "is_fine"), [("0.1", True), ("0.0999", False), ("3600", True), ("3600.1", False)])
def test_limits_are_inclusive(lease_s: str, is_fine: bool) -> None:
    """The smallest and the largest value are valid, and values beyond them are not."""
    if is_fine:
        assert router("--lease-s", lease_s).lease_s == float(lease_s)
    else:
        assert problems("--model", "m", "--lease-s", lease_s)


def test_secrets_are_not_shown() -> None:
    """A secret does not appear in `repr`."""
    settings = router("--token", "hunter2")
    assert settings.token == "hunter2"
    assert "hunter2" not in repr(settings)


def test_help_lists_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints each setting's flag, unit, limits, default and variable, and exits with status 0."""
    with pytest.raises(SystemExit) as ended:
        load(RouterSettings, argv=["--help"], environ={})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text(RouterSettings, program="kvmesh").strip()
    assert "--lease-s NUMBER\n      Lease. [seconds; at least 0.1; at most 3600; default 30.0] KVMESH_LEASE_S" in text
    assert "--is-eager / --no-is-eager" in text
    assert "--policy kv|random" in text
    assert "[default 7001" not in text
    assert "default 7001] KVMESH_LISTEN_PORT" in text


def test_a_missing_or_invalid_file_is_reported(tmp_path: Path) -> None:
    """A configuration file must exist and be TOML."""
    broken = tmp_path / "broken.toml"
    broken.write_text("= 5")
    assert "cannot be read" in problems("--model=m", "--config", str(tmp_path / "none.toml"))[0]
    assert "is not TOML" in problems("--model=m", f"--config={broken}")[0]
    assert problems("--model=m", "--config") == ("--config needs a value",)


def test_a_value_may_contain_flags() -> None:
    """A quoted word of several flags, for another program, is a value. A single flag is not a value."""
    assert router("--token", "--seed 1 --lease-s 2").token == "--seed 1 --lease-s 2"
    assert problems("--model=m", "--token", "--seed", "1")[0] == "--token needs a value"


def test_invalid_settings_exit_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """All problems are printed on stderr."""
    with pytest.raises(SystemExit) as ended:
        load_or_exit(RouterSettings, program="router", argv=["--listen-port=x"], environ={})
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.count("router: ") == 2
    assert "--listen-port must be an integer, not 'x'" in text


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A group with a field that only code sets."""

    pool: int = setting(3, "How many there are.")
    extra: Mapping[str, Any] = setting({}, "More of it.")
    name: str = "unset"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Documented = group(Documented, without=("name",))


@pytest.mark.parametrize(
    "argv", [["services.router", "--help"], ["kvmesh.cli", "up", "--help"], ["kvmesh.cli", "--help"]]
)
def test_help_into_a_closed_pipe_prints_no_traceback(argv: list[str]) -> None:
    """`--help | head -1` prints no traceback, even if the reader has closed the pipe before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", *argv], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert done.stderr == b""


def test_a_setting_without_a_default_is_shown_as_required() -> None:
    """The page of settings shows `required`, like `--help`."""
    spec = next(spec for spec in specs(RouterSettings) if spec.key == "model")
    assert default_text(spec) == "required"


def test_hidden_settings_have_no_flag() -> None:
    """A field that only code sets has no flag."""
    text = help_text(Outer, program="test")
    assert "How many there are." in text and "--inner-name" not in text
    loaded = load(Outer, argv=["--inner-pool", "5", "--inner-extra", '{"a": 1}'], environ={})
    assert loaded.inner == Documented(pool=5, extra={"a": 1})
    with pytest.raises(SettingsError, match="inner-name"):
        load(Outer, argv=["--inner-name", "x"], environ={})


def test_operands_are_words_without_a_flag() -> None:
    """Operands may stand anywhere. A boolean flag takes no value, and a word with a space is a value, whatever its first characters are."""
    argv = [
        "one",
        "--seed",
        "1",
        "two",
        "--is-eager",
        "three",
        "--model",
        "--a b",
        "--lease-s=4",
        "four",
        "--no-is-eager",
    ]
    operands, others = split_operands(RouterSettings, argv)
    assert operands == ["one", "two", "three", "four"]
    assert others == ["--seed", "1", "--is-eager", "--model", "--a b", "--lease-s=4", "--no-is-eager"]
    assert split_operands(RouterSettings, ["--seed", "--model", "m", "-h", "five"]) == (
        ["five"],
        ["--seed", "--model", "m", "-h"],
    )


def test_a_word_that_is_not_a_flag_is_reported() -> None:
    """Each wrong word, such as `blue` in `kvmesh status blue`, is a separate problem."""
    with pytest.raises(SettingsError) as caught:
        load(RouterSettings, argv=["blue", "--model", "m", "--sead", "1"], environ={})
    assert caught.value.problems == ("blue is no flag; flags begin with --", "--sead is unknown; did you mean --seed?")


def test_an_empty_choice_is_not_listed() -> None:
    """For a setting whose default is empty, the help and the error list only the non-empty choices."""

    @dataclass(frozen=True, kw_only=True)
    class Chosen:
        engine: str = setting("", "an engine", choices=("", "vllm", "simulated"))

    with pytest.raises(SettingsError, match="--engine must be one of vllm, simulated, not 'vlm'"):
        load(Chosen, argv=["--engine", "vlm"], environ={}, program="x", description="")
    assert "--engine vllm|simulated" in help_text(Chosen, program="x", description="")
