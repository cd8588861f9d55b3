"""Whole meshes with real SGLang engines, as `kvmesh up` starts them."""

from pathlib import Path

import pytest

from tests.integration.mesh import chat, running_mesh
from tests.parts import require_part

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
FLAGS = ("--engine", "sglang", "--greeting", "", "--no-planner", "--engine-args=--sglang-dtype float32")
OPTIONS = {"temperature": 0, "max_tokens": 16}
TEXTS = ("Hello! Who are you?", "What is the capital of France?", "Count to five.", "word " * 300)


async def answers(folder: Path, *argv: str) -> list[object]:
    """The texts' answers from a mesh of its own."""
    async with running_mesh(folder, *FLAGS, *argv, ready_timeout_s=200) as mesh:
        found = [await chat(mesh.url, text, **OPTIONS) for text in TEXTS]
    assert all(each["usage"]["completion_tokens"] > 0 for each in found)  # type: ignore[index]
    return [each["choices"][0]["message"]["content"] for each in found]  # type: ignore[index]


async def test_a_pair_answers_as_one_worker(tmp_path: Path) -> None:
    """Prefill and decode workers that meet over NIXL give the answers of a worker that does both."""
    require_part("sglang")
    alone = await answers(tmp_path / "alone", "--prefill", "0")
    assert await answers(tmp_path / "pair", "--prefill", "1") == alone
