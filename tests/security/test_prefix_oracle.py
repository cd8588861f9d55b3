"""No tenant finds out what another has sent: neither by the count of cached tokens nor by the time to the first token."""

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
    """Cached tokens of a chat, and its duration."""
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
    """The attacker guesses the victim's prompt: no token is cached, and the engine computes all of it."""
    keys = write_keys(tmp_path / "keys.json", [{"tenant": each, "key": each} for each in ("victim", "attacker")])
    env = {"KVMESH_ACCESS_KEYS_FILE": str(keys)}
    flags = ("--prefill", "0", f"--engine-args=--simulated-profile-per-prefill-token-s {PER_TOKEN_S}")
    async with running_mesh(tmp_path, *argv_simulated(*flags), env=env) as mesh:
        await ask(mesh.url, "victim", SECRET)
        cached, own_s = await ask(mesh.url, "victim", SECRET)
        assert cached > 200
        for options in ({}, {"cache_salt": "victim"}, {"cache_salt": seed_of("victim")}):
            cached, guess_s = await ask(mesh.url, "attacker", SECRET, **options)
            assert cached == 0
            assert guess_s > max(own_s, 200 * PER_TOKEN_S)


def seed_of(tenant: str) -> str:
    """The salt that the victim's blocks have."""
    return isolated(replace(REQUEST, cache_salt=""), tenant, ()).cache_salt


def hashes_of(tenant: str, *sharing: str, **fields: Any) -> list[int]:
    request = isolated(replace(REQUEST, **fields), tenant, sharing)
    return block_hashes(range(64), 16, seed=seed_hash(request.adapter, request.cache_salt))


def test_tenants_have_blocks_of_their_own() -> None:
    """Unless both are listed. A tenant's own salts still tell its users apart, and no salt reaches another tenant's blocks."""
    assert hashes_of("a") == hashes_of("a")
    assert hashes_of("a") != hashes_of("b")
    assert hashes_of("a") != hashes_of("a", cache_salt="t")
    assert hashes_of("a", "a", "b") == hashes_of("b", "a", "b") != hashes_of("c", "a", "b")
    assert hashes_of("a", "*") == hashes_of("b", "*") == hashes_of("", "*")
    assert hashes_of("a", "a", cache_salt="b\0s") != hashes_of("b", cache_salt="s")
    assert hashes_of("a", cache_salt=seed_of("b")) != hashes_of("b", cache_salt="")
    assert isolated(REQUEST, "", ()) is REQUEST


def test_sessions_are_a_tenants_own() -> None:
    """A session's name binds it to workers, which another tenant must not find out; also among tenants that share prefixes."""
    for sharing in ((), ("a", "b"), ("*",)):
        one, two = (isolated(REQUEST, tenant, sharing).session_id for tenant in ("a", "b"))
        assert "c" not in {one, two} and one != two
    assert isolated(replace(REQUEST, session_id=""), "a", ("*",)).session_id == ""


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=frozenset({"embeddings"}))


async def test_every_way_to_the_engine_has_the_tenants_salt(embedding_model: ServedModel, tmp_path: Path) -> None:
    """Chats, completions and embeddings: what the worker gets and what the router gets are of the same chain."""
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
