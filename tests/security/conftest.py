"""Fixtures of the frontends under attack: their model and keys."""

from pathlib import Path

import pytest

from services.frontend.models import ServedModel
from tests.frontend_mesh import served_model, write_model
from tests.security.rig import write_keys


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("attacked-model")))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(
        tmp_path / "keys.json",
        [{"tenant": "acme", "key": "good"}, {"tenant": "zip", "key": "zip", "compressed_bodies": True}],
    )
