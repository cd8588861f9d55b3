"""Prefill and decode workers on separate hosts generate the tokens of a single engine. KV uses the network, because hosts share no memory."""

import asyncio
import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.engines.simulated.model_card import read_card
from kvmesh.engines.simulated.settings import SimulatedSettings
from tests.chaos.kills import expected
from tests.integration import vllm_model
from tests.integration.test_mesh_vllm import answers_alone
from tests.machines.mesh import Machines, machines
from tests.machines.traffic import MODEL
from tests.parts import require_part

HOSTS = ["router", "prefill-1", "decode-1", "frontend-1"]
ANSWER_TOKENS = 16
PROMPTS = 12
BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 16
SIMULATED = (
    *("--engine", "simulated", "--simulated-kv-transport-delay-s", "0"),
    *("--simulated-kv-bytes-per-block", str(BLOCK_BYTES), "--simulated-kv-blocks", "512"),
)
VLLM = ("--engine", "vllm", "--vllm-dtype", "float32", "--vllm-kv-cache-bytes", str(16 << 20))
VLLM_TOKEN_BYTES = 2 * vllm_model.LAYERS * vllm_model.KV_HEADS * vllm_model.HEAD_SIZE * 4
CUT_S_MAX = 60.0
PROBES_MAX, PROBE_S = 60, 0.5
"""Maximum requests after a cut until one has its KV transferred, and the pause between them."""


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    """Returns prompts of 40 to 400 tokens, no two with a common prefix."""
    rng = random.Random(seed)
    lengths = [40 + round(360 * i / (count - 1)) for i in range(count)]
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


async def answers(mesh: Machines, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the mesh's answers to prompts that are sent one after the other."""
    timeout = aiohttp.ClientTimeout(total=CUT_S_MAX)
    found = []
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for prompt in asked:
            body = {
                "model": "m", "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            async with session.post(f"{mesh.url('frontend-1')}/v1/completions", json=body) as response:
                answer: Any = await response.json()
            assert response.status == 200, (answer, mesh.logs())
            found.append(answer["choices"][0]["token_ids"])
    return found


def received_bytes(mesh: Machines, name: str) -> int:
    """Returns the bytes that a host's network interfaces received."""
    words = ("ip", "-n", mesh.hosts.hosts[name].space, "-j", "-s", "link")
    links = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return sum(link["stats64"]["rx"]["bytes"] for link in links if link["ifname"] != "lo")


async def transferred(mesh: Machines) -> float:
    """Returns the number of prompt tokens whose KV the decode worker has pulled."""
    return await mesh.metric("decode-1", "kvmesh_worker_transferred_tokens_total")


async def check_handoffs(
    mesh: Machines, asked: Sequence[Sequence[int]], right: list[list[int]], *, token_bytes: float, rest_tokens: int
) -> None:
    """Checks that the answers are right and that KV arrived over the network for at least half of the prompt tokens.

    On a busy machine a pull may time out, and the prompt is computed again. `rest_tokens` of each prompt are computed in any case.
    """
    bytes_before, tokens_before = received_bytes(mesh, "decode-1"), await transferred(mesh)
    assert await answers(mesh, asked) == right
    moved = await transferred(mesh) - tokens_before
    assert 2 * moved >= sum(len(prompt) - rest_tokens for prompt in asked), mesh.logs()
    assert received_bytes(mesh, "decode-1") - bytes_before >= moved * token_bytes


def check_fetched_model(mesh: Machines) -> None:
    """Checks that the frontend, whose host has no copy of the model, fetched the files that it needs from a worker."""
    copies = mesh.home("frontend-1") / "cache" / "kvmesh" / "model-files"
    assert any(path.name == "config.json" for path in copies.rglob("*"))


@pytest.mark.parametrize("version", [4, 6])
async def test_simulated_pair(tmp_path: Path, version: int) -> None:
    token_range = read_card(SimulatedSettings(model="m", model_dir=str(MODEL)))[1]
    asked = prompts(version)
    right = [expected(prompt, ANSWER_TOKENS, token_range) for prompt in asked]
    argv = ("--policy", "round_robin")
    async with machines(tmp_path, HOSTS, model=MODEL, engine_argv=SIMULATED, router_argv=argv, version=version) as mesh:
        token_bytes = BLOCK_BYTES / BLOCK_TOKENS
        await check_handoffs(mesh, asked, right, token_bytes=token_bytes, rest_tokens=BLOCK_TOKENS)
        check_fetched_model(mesh)


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_vllm_pair(tmp_path: Path) -> None:
    """Answers are also right while the path between the workers is cut. Afterwards KV is transferred again."""
    require_part("vllm")
    model = vllm_model.add_tokenizer(vllm_model.make_model(tmp_path / "models" / "tiny"))
    asked, during, after = prompts(1), prompts(2), prompts(3, PROBES_MAX)
    argv = ("--policy", "round_robin")
    async with machines(tmp_path, HOSTS, model=model, engine_argv=VLLM, router_argv=argv) as mesh:
        right = await answers_alone([*asked, *during, *after], model=model)
        await check_handoffs(mesh, asked, right[:PROMPTS], token_bytes=VLLM_TOKEN_BYTES, rest_tokens=1)
        check_fetched_model(mesh)
        mesh.hosts.cut("prefill-1", "decode-1")
        assert await answers(mesh, during) == right[PROMPTS : 2 * PROMPTS]
        mesh.hosts.join("prefill-1", "decode-1")
        before = await transferred(mesh)
        for number, prompt in enumerate(after):
            assert await answers(mesh, [prompt]) == [right[2 * PROMPTS + number]]
            if await transferred(mesh) > before:
                break
            await asyncio.sleep(PROBE_S)
        else:
            pytest.fail(f"no KV is transferred after the cut\n{mesh.logs()}")
