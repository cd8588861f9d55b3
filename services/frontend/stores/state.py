"""Where a frontend keeps files: stored responses, uploaded files, batches."""

import os
from pathlib import Path


def state_directory(given: str) -> Path:
    """The given directory, or the user's own: $XDG_STATE_HOME/kvmesh, else ~/.local/state/kvmesh."""
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "kvmesh"
