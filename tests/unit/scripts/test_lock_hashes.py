"""`make setup` installs only wheels whose digests are in the lock."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from lock_gpu import GPU_LOCKS, SUPPORTED, requirements, simplified
from lock_hashes import ENVIRONMENTS, MissingHashError, hashed, is_wanted, key_of, locked, read_hashes
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def test_every_pin_has_digests() -> None:
    """Otherwise the set-up fails: run `make lock` after a change of constraints*.txt."""
    known = read_hashes()
    for suffixes in ENVIRONMENTS:
        for suffix in suffixes:
            assert len(hashed(locked(suffix), known)) == len(locked(suffix))
    pins = {key_of(line.partition(";")[0]) for each in ENVIRONMENTS for suffix in each for line in locked(suffix)}
    nixl = next(version for name, version in pins if name == "nixl-cu12")
    assert set(known) == pins | {("nixl-cu13", nixl)}
    assert all(len(digest) == 64 for digests in known.values() for digest in digests)


@pytest.mark.parametrize("suffix", list(GPU_LOCKS))
def test_the_cuda_builds_are_locked_completely(suffix: str) -> None:
    """On a GPU machine the set-up resolves nothing: each requirement of pyproject.toml is locked, with one version per Python."""
    extra, beside, _ = GPU_LOCKS[suffix]
    lines = [line for each in (*beside, suffix) for line in locked(each)]
    environments = [
        {**default_environment(), "python_version": version, "python_full_version": f"{version}.1"}
        for version in ("3.11", "3.12", "3.13")
    ]
    for environment in environments:
        chosen: dict[str, set[str]] = {}
        for line in map(Requirement, lines):
            if line.marker is None or line.marker.evaluate(environment):
                chosen.setdefault(canonicalize_name(line.name), set()).add(str(line.specifier))
        assert {name: found for name, found in chosen.items() if len(found) > 1} == {}
        for wanted in map(Requirement, requirements(extra)):
            (version,) = chosen[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(version.removeprefix("==")), (wanted, version)
        assert {"torch", "nvidia-nccl-cu13", "triton", "nixl-cu13"} <= chosen.keys()


@pytest.mark.parametrize(
    ("line", "short"),
    [
        (f"a==1 ; {SUPPORTED[0]}", "a==1"),
        (f"a==1 ; python_full_version < '3.12' and {SUPPORTED[1]}", "a==1; python_full_version < '3.12'"),
        ("a==1 ; platform_machine == 'x86_64' and sys_platform == 'linux'", "a==1; platform_machine == 'x86_64'"),
        ("a==1", "a==1"),
    ],
)
def test_markers_that_always_hold_are_removed(line: str, short: str) -> None:
    assert simplified(line) == short


def test_a_pin_without_digest_is_refused() -> None:
    with pytest.raises(MissingHashError, match=r"no digest of aiohttp==0\.0\.1"):
        hashed(["aiohttp==0.0.1; python_version > '3.11'"])


@pytest.mark.parametrize(
    ("wheel", "wanted"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_28_aarch64.whl", True),
        ("a-1-py3-none-manylinux_2_17_x86_64.whl", True),
        ("a-1-cp313-cp313-musllinux_1_2_x86_64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("a-1.tar.gz", False),
    ],
)
def test_wheels_for_linux_and_supported_pythons_are_locked(wheel: str, wanted: bool) -> None:
    assert is_wanted(wheel) is wanted


def wheel(folder: Path, *, content: str) -> Path:
    """Writes a minimal wheel."""
    path = folder / "tinypart-1.0-py3-none-any.whl"
    info = "tinypart-1.0.dist-info"
    with ZipFile(path, "w") as archive:
        archive.writestr("tinypart.py", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinypart\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_pip_refuses_another_wheel_of_the_same_version(tmp_path: Path) -> None:
    """It does so even if pip's settings on the machine name constraints without digests."""
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    digest = sha256(wheel(tmp_path / "good", content="x = 1").read_bytes()).hexdigest()
    wheel(tmp_path / "bad", content="x = 2")
    (tmp_path / "theirs.txt").write_text("tinypart<2\nother==3\n")
    code = (
        "import sys; sys.path[:0] = ['scripts', '.']; import set_up, lock_hashes; from pathlib import Path\n"
        f"set_up.hashed = lambda lines: lock_hashes.hashed(lines, {{('tinypart', '1.0'): {{{digest!r}}}}})\n"
        "set_up.LOG.parent.mkdir(exist_ok=True); set_up.LOG.touch()\n"
        # A symbolic link would be a different environment, without pip.
        "python = set_up.VENV / 'bin' / 'python'; python.parent.mkdir(parents=True)\n"
        "python.write_text(f'#!/bin/sh\\nexec {sys.executable} \"$@\"\\n'); python.chmod(0o755)\n"
        "print(set_up.pip_lines_status(['tinypart==1.0'], '--target', str(set_up.CACHE / 'site')))"
    )
    statuses = {}
    for source in ("bad", "good"):
        place = tmp_path / f"from-{source}"
        place.mkdir()
        env = {
            **os.environ,
            "KVMESH_VENV": str(place / "venv"), "KVMESH_CACHE": str(place / "cache"),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / source), "PIP_CONSTRAINT": str(tmp_path / "theirs.txt"),
        }  # fmt: skip
        got = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        statuses[source] = got.stdout.strip()
    assert statuses == {"bad": "1", "good": "0"}
    log = (tmp_path / "from-bad" / "cache" / "set-up.log").read_text()
    assert "DO NOT MATCH THE HASHES" in log
