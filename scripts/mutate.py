"""Checks the tests: applies known defects to a copy of the tree, one at a time, and runs the tests of their area.

`tests/mutations.toml` lists the areas with their tests, and the defects. A defect *survives* if all tests of its area pass: a test is missing.
The results go to `docs/contribute/mutations.md`. Defects that a run leaves out keep their previous result there.

    python scripts/mutate.py                                    all areas
    python scripts/mutate.py --only router-index,kv             two areas
    python scripts/mutate.py --names queue-expire-none          one defect
    python scripts/mutate.py --missing                          defects without a result
    python scripts/mutate.py --list                             the defects, without running anything

Exits with status 0 if at least `CAUGHT_MIN` of the defects that ran were caught, 1 if fewer were, 2 if the list is not usable.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFECTS = ROOT / "tests" / "mutations.toml"
TABLE = ROOT / "docs" / "contribute" / "mutations.md"

CAUGHT_MIN = 0.9
TEST_TIMEOUT_S = 60
"""A test that hangs because of a defect fails after this time."""
RUN_TIMEOUT_MIN_S = 180.0
RUN_TIMEOUT_FACTOR = 6.0
"""Time limit of a run with a defect, relative to the run without one. A defect can make every test wait."""

PYTEST_OPTIONS = (
    *(
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "pytest_timeout",
        "-p",
        "_hypothesis_pytestplugin",
        "-p",
        "no:cacheprovider",
    ),
    *("--hypothesis-seed=0", "-o", f"timeout={TEST_TIMEOUT_S}"),
)
"""The only pytest plug-ins that are loaded. Loading all of them takes longer than the tests of most areas."""

SURVIVED = "**survived**"
NOT_RUN = "not run"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|.*\| (?P<result>[^|]+) \|$", re.MULTILINE)

HEAD = """# Planted defects

`make mutate` checks whether the tests catch defects. It copies the tree, applies one defect at a time to the copy and runs the tests of
its area. A defect is *caught* when a test fails, and *survives* when none does. `tests/mutations.toml` lists the defects, and
`scripts/mutate.py` writes this page.

<!-- not run: applies every defect, which takes hours -->
```bash
make mutate                                  # all areas
make mutate ARGS="--only router-index,kv"    # some areas
make mutate ARGS="--names queue-expire-none" # some defects
make mutate ARGS="--missing"                 # defects without a result
make mutate ARGS="--list"                    # the list
```

When you fix a bug, add it to the list: `old` is the fixed code, `new` is the code before the fix. A unit test checks that each `old` occurs
exactly once in its file. If you change such code, update the list in the same commit.

The tables show the latest result of each defect. A defect without a row has not been run yet; `--missing` runs those.
"""


class ListError(Exception):
    """The list does not fit the tree. The message names the entry and says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One change to one file. `harm`: the effect on users."""

    name: str
    area: str
    file: str
    old: str
    new: str
    harm: str

    def apply(self, root: Path) -> str:
        """Writes the file with the defect. Returns the original text. Raises ListError."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        path.write_text(self.applied_to(text), encoding="utf-8")
        return text

    def applied_to(self, text: str) -> str:
        """Returns the file's text with the defect. Raises ListError unless the old text occurs exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ListError(f"{self.name}: the old text occurs {found} times in {self.file}; update {DEFECTS.name}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of an area's tests. `failed`: the first test that failed; empty if all passed."""

    failed: str
    seconds: float
    output: str


def read_list(path: Path = DEFECTS) -> tuple[Mapping[str, Sequence[str]], list[Defect]]:
    """Reads the areas with their tests, and the defects. Raises ListError."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    areas = {name: list(area["tests"]) for name, area in document["area"].items()}
    defects = [Defect(**entry) for entry in document["defect"]]
    for defect in defects:
        if defect.area not in areas:
            raise ListError(f"{defect.name}: there is no area {defect.area}")
    return areas, defects


def copy_tree(target: Path) -> None:
    """Copies tracked files and untracked files that git does not ignore, so no virtual environment and no cache."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: Sequence[str], limit_s: float | None = None) -> Run:
    """Runs tests of a copy of the tree until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *PYTEST_OPTIONS, *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    began_s = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return Run(failed=f"timed out after {limit_s:.0f} s", seconds=time.monotonic() - began_s, output=output)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    seconds = time.monotonic() - began_s
    if process.returncode == 0:
        return Run(failed="", seconds=seconds, output=output)
    found = FAILED.search(output)
    name = found.group(1) if found is not None else f"pytest ended with status {process.returncode}"
    return Run(failed=name, seconds=seconds, output=output)


def run_area(tree: Path, area: str, tests: Sequence[str], defects: Iterable[Defect]) -> Iterator[tuple[Defect, str]]:
    """Yields each defect with the test that caught it, or SURVIVED. Raises ListError if the tests fail without a defect."""
    clean = run_tests(tree, tests)
    print(f"{area}: {clean.seconds:.0f} s without a defect", flush=True)
    if clean.failed:
        raise ListError(f"{area}: its tests fail without a defect\n{clean.output[-4000:]}")
    limit_s = max(RUN_TIMEOUT_MIN_S, RUN_TIMEOUT_FACTOR * clean.seconds)
    for defect in defects:
        before = defect.apply(tree)
        try:
            run = run_tests(tree, tests, limit_s)
        finally:
            (tree / defect.file).write_text(before, encoding="utf-8")
        result = run.failed or SURVIVED
        print(f"  {defect.name}: {result} ({run.seconds:.0f} s)", flush=True)
        yield defect, result


def read_results(path: Path = TABLE) -> dict[str, str]:
    """Reads the results in the table, by the defect's name."""
    if not path.is_file():
        return {}
    return {match["name"]: match["result"].strip(" `") for match in ROW.finditer(path.read_text(encoding="utf-8"))}


def table(defects: Sequence[Defect], results: Mapping[str, str]) -> str:
    """Renders the page with the defects that have a result."""
    ran = [each for each in defects if results.get(each.name, NOT_RUN) != NOT_RUN]
    lines = [HEAD]
    for area in dict.fromkeys(defect.area for defect in ran):
        lines += [f"## {area}", "", "| defect | effect on users | caught by |", "|---|---|---|"]
        for defect in (each for each in ran if each.area == area):
            result = results[defect.name]
            cell = f"`{result}`" if "::" in result else result
            lines.append(f"| `{defect.name}` | {defect.harm} | {cell} |")
        lines.append("")
    return "\n".join(lines)


def select(defects: Sequence[Defect], areas: Iterable[str], names: Iterable[str]) -> list[Defect]:
    """Selects defects by area or by name, or all of them if neither is given. Raises ListError for an unknown name."""
    wanted_areas, wanted_names = set(areas), set(names)
    unknown = (wanted_areas - {each.area for each in defects}) | (wanted_names - {each.name for each in defects})
    if unknown:
        raise ListError(f"not in {DEFECTS.name}: {', '.join(sorted(unknown))}")
    if not wanted_areas and not wanted_names:
        return list(defects)
    return [each for each in defects if each.area in wanted_areas or each.name in wanted_names]


def run(chosen: Sequence[Defect], areas: Mapping[str, Sequence[str]], defects: Sequence[Defect]) -> list[str]:
    """Runs the selected defects, writes the table after each area, and returns the survivors."""
    results: dict[str, str] = {}
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-mutate-") as name:
        tree = Path(name)
        copy_tree(tree)
        for area in dict.fromkeys(defect.area for defect in chosen):
            for defect, result in run_area(tree, area, areas[area], [each for each in chosen if each.area == area]):
                results[defect.name] = result
                survivors += [defect.name] if result == SURVIVED else []
                # Reads the table again, because another run may have written other rows meanwhile.
                TABLE.write_text(table(defects, {**read_results(), **results}), encoding="utf-8")
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Applies known defects to a copy of the tree and runs the tests.")
    parser.add_argument("--only", default="", help="areas, separated by commas")
    parser.add_argument("--names", default="", help="defects, separated by commas")
    parser.add_argument("--missing", action="store_true", help="only defects without a result in the table")
    parser.add_argument("--list", action="store_true", help="show the defects and run nothing")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Ends the running tests and removes the copy.
    try:
        areas, defects = read_list()
        for defect in defects:
            defect.applied_to((ROOT / defect.file).read_text(encoding="utf-8"))
        chosen = select(defects, filter(None, options.only.split(",")), filter(None, options.names.split(",")))
        if options.missing:
            chosen = [each for each in chosen if read_results().get(each.name, NOT_RUN) == NOT_RUN]
        if options.list:
            for defect in chosen:
                print(f"{defect.area:20} {defect.name:45} {defect.file}")
            return 0
        survivors = run(chosen, areas, defects)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    caught = len(chosen) - len(survivors)
    print(
        f"{caught} of {len(chosen)} caught; survived: {', '.join(survivors) or 'none'}; see {TABLE.relative_to(ROOT)}"
    )
    return 0 if caught >= CAUGHT_MIN * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
