"""An environment without compilers, in which compilation fails or leaves files."""

import os
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "icx", "icpx", "nvcc")


def environment_without_compilers(folder: Path) -> dict[str, str]:
    """Returns the variables for a child process. The caches of compilers are below `folder`/caches."""
    caches = folder / "caches"
    return {
        "PATH": str(commands_without_compilers(folder / "bin")),
        "CC": "",
        "CXX": "",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCH_EXTENSIONS_DIR": str(caches / "extensions"),
    }


def compiled_files(folder: Path) -> list[Path]:
    """Returns the files that processes in the environment of `folder` compiled."""
    return [path for path in (folder / "caches").rglob("*") if path.is_file()]


def commands_without_compilers(folder: Path) -> Path:
    """Creates links to all commands on PATH except compilers, whose names may have a prefix and a version."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).iterdir() if Path(place).is_dir() else ():
            parts = command.name.split("-")
            if not any(part in COMPILERS for part in parts) and not (folder / command.name).is_symlink():
                (folder / command.name).symlink_to(command)
    return folder
