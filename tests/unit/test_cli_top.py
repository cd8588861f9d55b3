"""Tests of the text of `kvmesh top`: rates, and escape sequences in names. tests/ui/test_top.py tests the application."""

from dataclasses import replace

import pytest

from kvmesh.cli.__main__ import main as run_command
from kvmesh.cli.top import main, render_rows, rows_of
from kvmesh.core import LoadRecord, Role, WorkerRef, WorkerView
from kvmesh.rpc.mesh.rows import by_name

LOAD = LoadRecord(
    worker_id="d1",
    epoch=1,
    taken_at_s=100.0,
    running_requests=3,
    waiting_requests=2,
    kv_blocks_used=25,
    kv_blocks_total=100,
    prompt_tokens_total=600,
    cached_tokens_total=300,
    transferred_tokens_total=300,
    output_tokens_total=1000,
)


def view(load: LoadRecord | None, *, name: str = "d1", rank: int | None = None, excluded_by: str = "") -> WorkerView:
    worker = WorkerRef(worker_id=name, address="d1:1", epoch=1, data_parallel_rank=rank)
    return WorkerView(worker=worker, role=Role.DECODE, model="demo", trust="exact", load=load, excluded_by=excluded_by)


def cells(before: LoadRecord | None, now: LoadRecord | None) -> list[str]:
    """Returns the cells of the only row."""
    earlier = {} if before is None else by_name(rows_of([view(before)]))
    return render_rows(rows_of([view(now)], earlier)).splitlines()[1].split()


def test_rates_are_changes_by_the_workers_own_clock() -> None:
    """The records are two seconds apart, with 100 output tokens and 400 prompt tokens between them."""
    later = replace(LOAD, taken_at_s=102.0, output_tokens_total=1100, prompt_tokens_total=1000)
    assert cells(LOAD, later) == ["d1", "decode", "3", "2", "25%", "50", "200", "19%", "-"]


@pytest.mark.parametrize("before", [None, replace(LOAD, epoch=2)])
def test_without_an_earlier_count_of_the_same_process_rates_are_unknown(before: LoadRecord | None) -> None:
    """The first table has no rates, nor has the first one after a restart, which resets the worker's counters."""
    assert cells(before, LOAD) == ["d1", "decode", "3", "2", "25%", "-", "-", "25%", "-"]


def test_a_record_that_is_shown_twice_has_no_rate() -> None:
    """An idle worker sends no newer record, so its rates are 0."""
    assert cells(LOAD, LOAD)[5:7] == ["0", "0"]


def test_workers_without_a_record_and_excluded_ones_have_a_row_each() -> None:
    """Rows are sorted by name. Ranks of one worker have separate rows."""
    views = [view(None, name="d2", excluded_by="silent"), view(LOAD, rank=1), view(LoadRecord(), rank=0)]
    rows = [line.split() for line in render_rows(rows_of(views)).splitlines()[1:]]
    assert rows == [
        ["d1/0", "decode", "0", "0", "-", "-", "-", "-", "-"],
        ["d1/1", "decode", "3", "2", "25%", "-", "-", "25%", "-"],
        ["d2", "decode", *["-"] * 6, "silent"],
    ]


def test_escape_sequences_in_names_are_replaced() -> None:
    """A worker's id could contain an escape sequence that clears the screen or sets the title."""
    text = render_rows(rows_of([view(LOAD, name="d1\x1b[2J\x9b\r")]))
    assert text.isprintable() or set(text) - {"\n"} <= set(filter(str.isprintable, text))
    assert "d1\ufffd[2J" in text


def test_bad_command_lines_and_a_missing_mesh_are_reported_in_one_line(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVMESH_STATE", str(tmp_path / "none.json"))
    assert main(["--interval", "1"]) == 2
    assert "did you mean --interval-s?" in capsys.readouterr().err
    assert main([]) == 1
    assert "no mesh of yours runs here" in capsys.readouterr().err


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that resembles no command gets no suggestion."""
    assert run_command(["stauts"]) == 2
    assert "no such command: stauts; did you mean status?" in capsys.readouterr().err
    assert run_command(["zzz"]) == 2
    assert "no such command: zzz\n" in capsys.readouterr().err
