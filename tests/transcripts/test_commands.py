"""Transcripts of commands, whose output is reviewed as a document: the files beside this one that are named below.

`python -m tests.transcripts.test_commands` updates the files. Read the difference before you commit it.
"""

import contextlib
import io
import shlex
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import main

FOLDER = Path(__file__).parent
FILES = ("translate_args.txt", "advise.txt")


def transcript(path: Path) -> str:
    """Returns the comments and commands of the file, with the current output of each command."""
    lines = [line for line in path.read_text().splitlines() if line.startswith(("#", "$"))]
    return "\n".join(lines[:1] + [text for line in lines[1:] for text in _block(line)]) + "\n"


def _block(line: str) -> list[str]:
    if line.startswith("#"):
        return ["", line]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(shlex.split(line)[2:])
    printed = [f"  {text}".rstrip() for text in output.getvalue().splitlines()]
    return [line, *printed, f"  status {status}"]


@pytest.mark.parametrize("name", FILES)
def test_commands_print_what_the_transcript_shows(name):
    assert transcript(FOLDER / name) == (FOLDER / name).read_text()


if __name__ == "__main__":
    for each in FILES:
        (FOLDER / each).write_text(transcript(FOLDER / each))
