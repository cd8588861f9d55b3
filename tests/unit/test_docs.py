"""The documentation names flags that are there."""

import re
from pathlib import Path

import pytest

from kvmesh.cli.up_settings import UpSettings
from kvmesh.settings.declare import specs
from services.decode.settings import DecodeSettings
from services.frontend.settings import FrontendSettings
from services.planner.settings import PlannerSettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")]
COMPONENTS = (UpSettings, FrontendSettings, RouterSettings, PlannerSettings, PrefillSettings, DecodeSettings)
SPECS = [spec for component in COMPONENTS for spec in specs(component)]
FLAGS = {spec.flag for spec in SPECS}
SECTIONS = {spec.path[0].replace("_", "-") for spec in SPECS if len(spec.path) > 1}
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z0-9]+[a-z0-9_.-]*[a-z0-9])(-?\*)?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_are_spelt_as_they_are_taken(page: Path) -> None:
    """Those of a section of settings, such as --http-port; other words with two dashes belong to other programs."""
    wrong = []
    for no, name, is_family in FLAG.findall(page.read_text(encoding="utf-8")):
        flag = f"--{name}"
        if not any(name.startswith((f"{section}-", f"{section}.")) for section in SECTIONS):
            continue
        is_known = any(known.startswith(f"{flag}-") for known in FLAGS) if is_family else flag in FLAGS
        if not is_known:
            wrong.append(f"--{no}{name}{is_family}")
    assert not wrong
    # A switch takes no value: --no-... turns it off.
    assert not re.findall(r"--[a-z0-9-]+[ =](?:true|false)\b", page.read_text(encoding="utf-8"))
