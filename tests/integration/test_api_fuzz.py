"""Request bodies that no client would send get a response or a 4xx with an error object, never a 5xx, and leave no state behind."""

import json
import random
from pathlib import Path

import pytest

from services.frontend.models import ServedModel
from tests.frontend_mesh import FakeMesh, served_model, write_model
from tests.fuzz import fuzz
from tests.fuzz_bodies import ANSWERS, FIELDS, body_of
from tests.integration.test_frontend_http import frontend

ROUNDS = 1500
FEATURES = frozenset({"logprobs", "logit_bias", "structured_output", "prompt_logprobs"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=FEATURES)


@pytest.mark.parametrize("seed", [1, 2])
async def test_mutated_bodies(model: ServedModel, seed: int, tmp_path: Path) -> None:
    """Sends mutated bodies to all endpoints that accept a JSON object."""
    rng = random.Random(seed)
    answers = [model.text.tokenise(text, adds_special_tokens=False) for text in ANSWERS]
    statuses: dict[int, int] = {}
    async with frontend([model], FakeMesh(answer=lambda _: [*rng.choice(answers), 2])) as running:
        for _ in range(ROUNDS):
            path = rng.choice(sorted(FIELDS))
            body = body_of(rng, path)
            async with running.session.post(running.url + path, data=json.dumps(body).encode()) as response:
                text = await response.text()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status < 500, (path, body, text)
            if response.status >= 400:
                assert json.loads(text)["error"]["code"], (path, body, text)
            else:
                assert '"error"' not in text[:20] and "internal error" not in text, (path, body, text)
        assert running.pipeline.in_flight == 0
        assert not running.mesh.running and not running.mesh.handles
    assert statuses[200] > ROUNDS / 10 and statuses[400] > ROUNDS / 4


@pytest.mark.parametrize("seed", [3])
async def test_all_json_endpoints(seed: int, tmp_path: Path) -> None:
    """Also tests responses, messages and batches, and bodies that are not JSON. `python -m tests.fuzz` sends 100 000 bodies."""
    findings = await fuzz(tmp_path, bodies=2000, seed=seed)
    assert not findings.failures, findings.failures[0]
    assert findings.statuses[200] > 200 and findings.statuses[400] > 1000
