"""The one line that `kvmesh up` shows from the log of a process that failed."""

from pathlib import Path

import pytest

from kvmesh.cli.children import failure_line, log_tail

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/x/y.py", line 3, in start',
    "    raise ValueError(text)",
    "ValueError: the model has no tokenizer",
]
INFO = '{"time":"t","level":"info","event":"started","port":1}'
ERROR = '{"time":"t","level":"error","event":"part_failed","error":"OSError: no room","traceback":"Traceback ..."}'
VLLM = [
    "INFO 11-23 07:40:11 [core.py:93] Initializing a V1 LLM engine",
    "(EngineCore pid=7) ERROR 11-23 07:40:12 [core.py:842] ValueError: No available memory for the cache blocks.",
    "Traceback (most recent call last):",
    '  File "/x/y.py", line 3, in start',
    "RuntimeError: Engine core initialization failed. See root cause above.",
]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        ([INFO, *TRACEBACK], "ValueError: the model has no tokenizer"),
        ([*TRACEBACK, INFO], "ValueError: the model has no tokenizer"),
        ([INFO, ERROR, INFO], "part_failed: OSError: no room"),
        ([ERROR, "no policy is named 'x'"], "no policy is named 'x'"),
        (VLLM, "ValueError: No available memory for the cache blocks."),
        ([*TRACEBACK, "sys:1: ResourceWarning: unclosed socket"], "ValueError: the model has no tokenizer"),
        ([INFO], "started"),
        (["x: --x is unknown", "`python -m services.decode --help` lists all settings."], "x: --x is unknown"),
    ],
)
def test_the_line_states_the_cause(lines: list[str], expected: str) -> None:
    """The line has the cause of the failure, which may be older than the last line. It is neither a traceback nor JSON."""
    assert failure_line(lines) == expected


def test_a_log_may_be_missing_or_long(tmp_path: Path) -> None:
    """Only the end of the log is read."""
    assert log_tail(tmp_path / "none.log") == ()
    (tmp_path / "long.log").write_text("x" * 1_000_000 + "\nlast\n")
    assert log_tail(tmp_path / "long.log")[-1] == "last"
