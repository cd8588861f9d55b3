"""systemd accepts the units, they are hardened, and the settings and paths in them exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.lifecycle import STOP_TIMEOUT_S
from kvmesh.settings.declare import specs
from kvmesh.worker.settings import HostSettings
from services.frontend.settings import FrontendSettings
from services.planner.settings import PlannerSettings
from services.router.settings import RouterSettings
from tests.parts import require_part

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
ROLES: dict[str, type] = {
    "frontend": FrontendSettings,
    "router": RouterSettings,
    "planner": PlannerSettings,
    "prefill": HostSettings,
    "decode": HostSettings,
}
EXPOSURE_MAX = 2.5
"""The rating goes up to 10. systemd calls a rating below 4 OK, and gives 9.6 to a unit without hardening."""


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with an interpreter that exists, and one instance of each template."""
    for unit in UNITS.glob("kvmesh*"):
        text = unit.read_text().replace("/opt/kvmesh/.venv/bin/python", sys.executable)
        (tmp_path / unit.name).write_text(text)
        if "@" in unit.name:
            (tmp_path / unit.name.replace("@", "@one")).write_text(text)
    return tmp_path


def analyze(units: Path, *words: str) -> subprocess.CompletedProcess[str]:
    binary = require_part("systemd-analyze")
    environment = {"SYSTEMD_UNIT_PATH": f"{units}:", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [str(binary), *words], cwd=units, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def problems(units: Path) -> str:
    """Returns the problems that systemd reports, or an empty text."""
    names = [f"./{path.name}" for path in sorted(units.glob("kvmesh*@one.service"))]
    assert len(names) == len(ROLES)
    found = analyze(units, "verify", "--man=no", *names, "./kvmesh.target")
    return found.stderr + ("" if found.returncode == 0 else f"status {found.returncode}")


def test_systemd_accepts_the_units(units: Path) -> None:
    """The units have no unknown option, no missing program and no invalid value."""
    assert problems(units) == ""


@pytest.mark.parametrize("bad", ["ProtectSystme=strict", "TimeoutStopSec=soon", "ExecStart=/opt/none -m x"])
def test_the_check_finds_invalid_units(units: Path, bad: str) -> None:
    unit = units / "kvmesh-router@one.service"
    key = bad.split("=")[0]
    lines = [line for line in unit.read_text().splitlines() if not line.startswith(f"{key}=")]
    unit.write_text("\n".join(lines).replace("[Service]", f"[Service]\n{bad}"))
    assert problems(units) != ""


@pytest.mark.parametrize("role", ROLES)
def test_units_are_hardened(units: Path, role: str) -> None:
    """The exposure level that systemd computes is below the limit."""
    found = analyze(units, "security", "--offline=true", "--no-pager", f"./kvmesh-{role}@one.service")
    rating = re.search(r"Overall exposure level for \S+: ([0-9.]+)", found.stdout)
    assert rating is not None, found.stdout + found.stderr
    assert float(rating[1]) <= EXPOSURE_MAX


@pytest.mark.parametrize("role", ROLES)
def test_units_set_existing_settings(role: str) -> None:
    """Each variable is a setting of the role. The variables of the shared file are settings of every role."""
    known = {each.variable for each in specs(ROLES[role])}
    text = (UNITS / f"kvmesh-{role}@.service").read_text()
    shared = re.findall(r"^(KVMESH_[A-Z0-9_]+)=", (UNITS / "mesh.env").read_text(), re.MULTILINE)
    own = [word for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE) for word in line.split()]
    names = [*shared, *(word.split("=")[0] for word in own if word.startswith("KVMESH_"))]
    assert len(names) >= 6
    assert set(names) <= known
    assert f"-m services.{role}\n" in text


def test_secrets_are_credentials() -> None:
    """No unit and no environment file contains a secret. All secrets come from LoadCredential."""
    for path in UNITS.iterdir():
        text = path.read_text()
        assert not re.search(
            r"(?i)(password|token|secret)=(?!%d|/)\S", text.replace("KVMESH_DISCOVERY_TOKEN_FILE", "")
        ), path
    for role in ROLES:
        text = (UNITS / f"kvmesh-{role}@.service").read_text()
        for name in ("mesh-secret", "tls.crt", "tls.key", "ca.crt", "registry-token"):
            assert f"LoadCredential={name}:/etc/kvmesh/credentials/" in text


def test_a_stop_has_time_to_drain() -> None:
    """systemd kills a service later than the service's own limits for draining and closing."""
    frontend = FrontendSettings()
    longest_s = frontend.lifecycle.drain_timeout_s + STOP_TIMEOUT_S
    for role in ROLES:
        text = (UNITS / f"kvmesh-{role}@.service").read_text()
        stop_s = float(re.findall(r"^TimeoutStopSec=(\d+)s$", text, re.MULTILINE)[0])
        assert stop_s >= (longest_s + 5 if role in ("frontend", "prefill", "decode") else 30)
