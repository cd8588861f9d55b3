from pathlib import Path

import pytest
from mutate import NOT_RUN, ROOT, SURVIVED, Defect, ListError, read_list, read_results, select, table

AREAS, DEFECTS = read_list()
ONE = Defect(name="one", area="a", file="x.py", old="a < b", new="a <= b", harm="An extra block.")


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_can_be_applied(defect: Defect) -> None:
    """A change of the line would leave its defect untested. If you change such a line, update tests/mutations.toml."""
    changed = defect.applied_to((ROOT / defect.file).read_text(encoding="utf-8"))
    compile(changed, defect.file, "exec")
    assert defect.old != defect.new
    assert defect.harm.endswith(".") and "|" not in defect.harm


def test_the_list_is_consistent() -> None:
    """Names are unique, and every area has defects and existing tests."""
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert {defect.area for defect in DEFECTS} == set(AREAS)
    named = [test for tests in AREAS.values() for test in tests if not test.startswith("-")]
    missing = [test for test in named if not (ROOT / test.partition("::")[0]).exists()]
    assert not missing


def test_a_changed_line_is_an_error(tmp_path: Path) -> None:
    """A defect that cannot be applied must not count as caught or as survived."""
    (tmp_path / "x.py").write_text("a < b\na < b\n")
    with pytest.raises(ListError, match=r"one: the old text occurs 2 times in x\.py"):
        ONE.apply(tmp_path)
    (tmp_path / "x.py").write_text("b > a\n")
    with pytest.raises(ListError, match=r"occurs 0 times"):
        ONE.apply(tmp_path)


def test_a_run_of_some_defects_keeps_the_results_of_the_others(tmp_path: Path) -> None:
    """The table stores the results between runs."""
    two = Defect(name="two", area="a", file="y.py", old="1", new="2", harm="A block too few.")
    page = tmp_path / "mutations.md"
    page.write_text(table([ONE, two], {"one": "tests/unit/test_x.py::test_y", "two": SURVIVED}))
    page.write_text(table([ONE, two], {**read_results(page), "one": NOT_RUN}))
    assert read_results(page) == {"two": SURVIVED}
    page.write_text(table([ONE, two], {**read_results(page), "one": "tests/unit/test_x.py::test_y"}))
    assert read_results(page) == {"one": "tests/unit/test_x.py::test_y", "two": SURVIVED}


def test_an_unknown_area_is_an_error() -> None:
    """A misspelt area would run nothing and report success."""
    assert select([ONE], ["a"], []) == select([ONE], [], ["one"]) == select([ONE], [], []) == [ONE]
    with pytest.raises(ListError, match="nowhere"):
        select([ONE], ["nowhere"], [])
