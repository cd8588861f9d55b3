"""A tenant cannot find out another tenant's prompts, neither by the number of cached tokens nor by the time to the first token."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.kv.blocks import block_hashes, seed_hash
from services.frontend.access.isolation import isolated
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import Request
from tests.frontend_mesh import served_model, write_model
from tests.integration.mesh import argv_simulated, running_mesh
from tests.security.rig import BODY, CHAT, frontend, write_keys

SECRET = "The secret of the house of Ahlgren is buried under the third tree. " * 10
PER_TOKEN_S = 0.004
"""Time of the simulated engine for each prompt token that is not cached: about a second for the prompt."""
REQUEST = Request(request_id="r", model="m", prompt="x", cache_salt="s", session_id="c")


async def ask(url: str, key: str, text: str, **options: Any) -> tuple[int, float]:
    """Returns the cached tokens of a chat and its duration."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **options}
    began_s = time.monotonic()
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(url + CHAT, json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], time.monotonic() - began_s


async def test_a_right_guess_looks_like_a_wrong_one(tmp_path: Path) -> None:
    """If the attacker guesses the victim's prompt, no token is cached, and the engine computes all of it."""
    keys = write_keys(tmp_path / "keys.json", [{"tenant": each, "key": each} for each in ("victim", "attacker")])
    env = {"KVMESH_ACCESS_KEYS_FILE": str(keys)}
    flags = ("--prefill", "0", f"--engine-args=--simulated-profile-per-prefill-token-s {PER_TOKEN_S}")
    async with running_mesh(tmp_path, *argv_simulated(*flags), env=env) as mesh:
        await ask(mesh.url, "victim", SECRET)
        cached, _ = await ask(mesh.url, "victim", SECRET)
        assert cached > 200
        for options in ({}, {"cache_salt": "victim"}, {"cache_salt": seed_of("victim")}):
            cached, guess_s = await ask(mesh.url, "attacker", SECRET, **options)
            assert cached == 0
            # An answer from the cache takes less, except on a machine that is too busy to tell.
            assert guess_s > 200 * PER_TOKEN_S


def seed_of(tenant: str) -> str:
    """Returns the salt of the tenant's blocks."""
    return isolated(replace(REQUEST, cache_salt=""), tenant, ()).cache_salt


def hashes_of(tenant: str, *sharing: str, **fields: Any) -> list[int]:
    request = isolated(replace(REQUEST, **fields), tenant, sharing)
    return block_hashes(range(64), 16, seed=seed_hash(request.adapter, request.cache_salt))


def test_block_hashes_differ_between_tenants() -> None:
    """Tenants have different block hashes unless both are in the sharing list. A tenant's own salts separate its users.

    No salt gives the block hashes of another tenant.
    """
    assert hashes_of("a") == hashes_of("a")
    assert hashes_of("a") != hashes_of("b")
    assert hashes_of("a") != hashes_of("a", cache_salt="t")
    assert hashes_of("a", "a", "b") == hashes_of("b", "a", "b") != hashes_of("c", "a", "b")
    assert hashes_of("a", "*") == hashes_of("b", "*") == hashes_of("", "*")
    assert hashes_of("a", "a", cache_salt="b\0s") != hashes_of("b", cache_salt="s")
    assert hashes_of("a", cache_salt=seed_of("b")) != hashes_of("b", cache_salt="")
    assert isolated(REQUEST, "", ()) is REQUEST


def test_session_names_differ_between_tenants() -> None:
    """Equal session names of two tenants differ inside the mesh, even if the tenants share prefixes, because a session reveals its workers."""
    for sharing in ((), ("a", "b"), ("*",)):
        one, two = (isolated(REQUEST, tenant, sharing).session_id for tenant in ("a", "b"))
        assert "c" not in {one, two} and one != two
    assert isolated(replace(REQUEST, session_id=""), "a", ("*",)).session_id == ""


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=frozenset({"embeddings"}))


async def test_every_endpoint_salts_blocks_by_tenant(embedding_model: ServedModel, tmp_path: Path) -> None:
    """For chats, completions and embeddings, the worker's salt and the router's block hashes are those of the tenant."""
    rows = [{"tenant": each, "key": each} for each in ("a", "b")]
    async with frontend(embedding_model, keys=write_keys(tmp_path / "k.json", rows)) as rig:
        for path, body in (
            (CHAT, BODY),
            ("/v1/completions", {"model": "tiny", "prompt": "one two three four", "max_tokens": 1}),
            ("/v1/embeddings", {"model": "tiny", "input": "one two three four"}),
        ):
            salts = []
            for tenant in ("a", "b"):
                async with (
                    aiohttp.ClientSession(headers={"Authorization": f"Bearer {tenant}"}) as session,
                    session.post(rig.url + path, json=body) as response,
                ):
                    assert response.status == 200, await response.text()
                generation, asked = rig.mesh.generations[-1], rig.mesh.asks[-1]
                salts.append(generation.cache_salt)
                if asked.block_hashes:
                    seed = seed_hash(generation.adapter, generation.cache_salt)
                    assert list(asked.block_hashes) == block_hashes(generation.token_ids, 4, seed=seed)
            assert len({*salts, ""}) == 3
