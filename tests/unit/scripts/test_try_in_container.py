"""The files and settings that `try_in_container.py` copies into the container."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("try_in_container")


def test_pips_settings_apply_in_the_container(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the settings name are copied and folders are shared. Without them every `pip install` in the container would fail."""
    for name in ("wheels", "index/simple"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "limits.txt").write_text("torch<3\n")
    settings = tmp_path / "pip.conf"
    settings.write_text(
        f"[global]\nconstraint = {tmp_path}/limits.txt\nfind-links = {tmp_path}/wheels\n"
        f"extra-index-url = file://{tmp_path}/index/simple\n"
    )
    for name in ("PIP_CONSTRAINT", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    inside = tmp_path / "inside"
    inside.mkdir()
    assert script.copy_machine_settings(inside) == [tmp_path / "index", tmp_path / "wheels"]
    assert (inside / str(tmp_path)[1:] / "limits.txt").read_text() == "torch<3\n"
    assert f"constraint = {tmp_path}/limits.txt" in (inside / "etc/pip.conf").read_text()


def test_the_advised_command_is_found(script: ModuleType) -> None:
    """The run as a normal user continues with the command that the set-up prints."""
    message = (
        "Install them, then run the same command again:\n    sudo apt-get update &&\n    sudo apt-get install -y a b\n"
    )
    found = script.ADVICE.search(message)
    assert found is not None and found[1] == "apt-get install -y a b"
