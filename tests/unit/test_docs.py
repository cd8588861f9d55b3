"""The documentation names flags, settings, files and links that exist, and states the declared defaults."""

import re
from pathlib import Path

import pytest

from kvmesh.cli.up_settings import UpSettings
from kvmesh.client.settings import ClientSettings, RetryPolicy
from kvmesh.settings.declare import specs
from kvmesh.worker.settings import HostSettings
from services.frontend.settings import FrontendSettings
from services.planner.settings import PlannerSettings
from services.router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")]
GUIDES = set(ROOT.glob("docs/engines/*-*.md"))
COMPONENTS = (UpSettings, FrontendSettings, RouterSettings, PlannerSettings, HostSettings)
SPECS = [spec for component in COMPONENTS for spec in specs(component)]
FLAGS = {spec.flag for spec in SPECS}
DEFAULTS: dict[str, list[float]] = {}
for each in (*SPECS, *specs(ClientSettings), *specs(RetryPolicy)):
    if isinstance(each.default, int | float):
        for name in (each.flag, ".".join(each.path), each.path[-1]):
            DEFAULTS.setdefault(name, []).append(each.default)
SECTIONS = {spec.path[0].replace("_", "-") for spec in SPECS if len(spec.path) > 1}
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z0-9]+[a-z0-9_.-]*[a-z0-9])(-?\*)?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    """Flags of a group of settings, such as --http-port, are checked. Other words with two dashes can belong to other programs."""
    if page in GUIDES:
        pytest.skip("the flags are those of the engines' servers; tests/unit/test_engine_flags.py checks kvmesh's")
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


STATED_DEFAULT = re.compile(r"`((?:--)?[a-z][a-z0-9_.-]+)` \(([0-9][0-9. ]*) ?(s|ms|%|Ki|Mi|Gi|KiB|MiB|GiB)?\)")
UNITS = {"ms": 0.001, "%": 0.01, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_stated_defaults_are_the_declared_ones(page: Path) -> None:
    """A number in parentheses after a setting, such as `queue.wait_s_max` (30 s), is its default.

    The last part of a setting's path is enough to name it.
    """
    wrong = []
    for name, number, unit in STATED_DEFAULT.findall(page.read_text(encoding="utf-8")):
        stated = float(number.replace(" ", "")) * UNITS.get(unit.removesuffix("B"), 1.0)
        declared = DEFAULTS.get(name, [])
        if declared and not any(value == pytest.approx(stated) for value in declared):
            wrong.append(f"{name}: {stated:g} is stated, {declared} declared")
    assert wrong == []


SETTING_KEY = re.compile(r"`([a-z_]+(?:\.[a-z0-9_]+)+)`")
KEYS = {spec.key for spec in SPECS}
GROUPS = {spec.path[0] for spec in SPECS if len(spec.path) > 1}
FILE_ENDINGS = (".py", ".toml", ".json", ".sqlite")


# The change log also names settings of earlier versions.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_keys_are_settings(page: Path) -> None:
    """A code span such as `queue.wait_s_max`, which begins with a group of settings, is a setting."""
    found = SETTING_KEY.findall(page.read_text(encoding="utf-8"))
    keys = {name for name in found if name.partition(".")[0] in GROUPS and not name.endswith(FILE_ENDINGS)}
    assert sorted(keys - KEYS) == []


# This page has results of runs, with the names that tests had then.
RESULTS = {ROOT / "docs/contribute/mutations.md"}
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *sorted(set(ROOT.glob("docs/**/*.md")) - RESULTS),
    *ROOT.glob("kvmesh/**/README.md"),
    *ROOT.glob("services/**/README.md"),
    *(ROOT / folder / "README.md" for folder in ("bench", "examples")),
]
INDEXES = [ROOT / "docs/README.md", ROOT / "docs/understand/decisions/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\s]+)`")
SPAN = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SOURCE_FILE = re.compile(r"[\w./-]+\.(py|proto|sh)")
# A code span that begins with one of these is a path in the repository.
TOP = ("bench/", "compose/", "docs/", "examples/", "kvmesh/", "models/", "protos/", "scripts/", "services/", "tests/")
FILES = [str(file) for folder in TOP for file in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Relative Markdown links name files that exist, and headings in these files."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert [link for link in LINK.findall(text) if not is_reachable(page, link)] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """Code spans that look like paths name files that exist. `<name>`, `*` and `{a,b}` are patterns.

    A source file may be named by the last parts of its path, or by its path relative to the page's folder.
    """
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = {span.partition("::")[0].rstrip(":,") for span in CODE_SPAN.findall(text)}
    paths = {span for span in spans if span.startswith(TOP)}
    ends = {span for span in spans - paths if SOURCE_FILE.fullmatch(span)}
    missing = {path for path in paths if not any(ROOT.glob(as_pattern(path)))}
    ends = {end for end in ends if not (page.parent / end).is_file()}
    missing |= {end for end in ends if not any(file.endswith(f"/{end}") for file in FILES)}
    assert sorted(missing) == []


MODULES: dict[Path, list[Path]] = {}
for module in sorted((*(ROOT / "kvmesh").rglob("*.py"), *(ROOT / "services").rglob("*.py"))):
    if module.name != "__init__.py" and not module.is_relative_to(ROOT / "kvmesh/api"):
        MODULES.setdefault(module.parent, []).append(module)
FOLDER_READMES = sorted((*ROOT.glob("kvmesh/**/README.md"), *ROOT.glob("services/**/README.md")))


@pytest.mark.parametrize("folder", MODULES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_readme_names_every_module(folder: Path) -> None:
    """A folder with three or more modules has a README that names each. The parent's README may name the modules of a smaller folder."""
    own = folder / "README.md"
    page = own if own.exists() or len(MODULES[folder]) >= 3 else folder.parent / "README.md"
    assert page.exists(), f"{page.relative_to(ROOT)} is missing"
    named = {(page.parent / span).resolve() for span in CODE_SPAN.findall(page.read_text(encoding="utf-8"))}
    assert [module.name for module in MODULES[folder] if module not in named] == []


@pytest.mark.parametrize("page", FOLDER_READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_readme_names_modules_that_exist(page: Path) -> None:
    """A code span such as `name.py` is a path relative to the README's folder or to the top of the repository."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = {span for span in CODE_SPAN.findall(text) if span.endswith(".py")}
    assert sorted(span for span in named if not any((top / span).is_file() for top in (page.parent, ROOT))) == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to each page. The index of decisions links to each decision."""
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in INDEXES
        for link in LINK.findall(index.read_text(encoding="utf-8"))
    }
    pages = set(ROOT.glob("docs/**/*.md")) - {ROOT / "docs/README.md"}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []


# Messages of the operating system and of libraries.
FOREIGN_MESSAGES = {"address already in use"}


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    """Code spans in the first column are messages or codes of the product, or parts of them. `...` stands for values."""
    text = (ROOT / "docs/operate/troubleshooting.md").read_text(encoding="utf-8")
    sections = text.partition("## The mesh does not start")[2]
    first_cells = [line.split("|")[1] for line in sections.splitlines() if line.startswith("| ")]
    messages = {part.strip() for cell in first_cells for span in SPAN.findall(cell) for part in span.split("...")}
    messages -= FOREIGN_MESSAGES | {""}
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("kvmesh", "services")
        for path in (ROOT / folder).rglob("*.py")
        if "api" not in path.relative_to(ROOT).parts[1:2]
    )
    assert len(messages) > 20
    assert sorted(message for message in messages if message.lower() not in source.lower()) == []


HEADINGS = re.compile(r"^ *[A-Z]+(?: [A-Z]+)*(?:  +[A-Z]+(?: [A-Z]+)*){3,}$", re.MULTILINE)


def test_columns_of_tables_match_the_commands() -> None:
    """Output on a page has the headings that `status` and `explain` print. Headings of costs are names of the router's terms."""
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("kvmesh/cli", "services/router/placement")
        for path in (ROOT / folder).rglob("*.py")
    )
    shown = {
        heading
        for page in ROOT.glob("docs/**/*.md")
        for line in HEADINGS.findall(page.read_text(encoding="utf-8"))
        for heading in re.split(r"  +", line.strip())
    }
    assert {"REMOVED BY", "KV LEASED"} <= shown
    assert (
        sorted(
            each for each in shown if f'"{each}"' not in source and f'"{each.lower().replace(" ", "_")}"' not in source
        )
        == []
    )


def is_reachable(page: Path, link: str) -> bool:
    """Returns whether a link's file and heading exist. Links to other sites are not checked."""
    if re.match(r"[a-z]+:", link):
        return True
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not heading or heading in headings(target))


def headings(page: Path) -> set[str]:
    """Returns the anchors that GitHub generates for a page's headings."""
    lines = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def as_pattern(path: str) -> str:
    """Converts a path with placeholders to a glob pattern."""
    return re.sub(r"<[^>]*>|\{[^}]*\}", "*", path).rstrip("/")
