"""TensorRT-LLM engines on the stand-in of tests/fakes, which proves nothing about the real engine."""

import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvmesh.engines.base import Engine
from kvmesh.engines.trtllm import feeds
from kvmesh.engines.trtllm.engine import TrtllmEngine
from kvmesh.engines.trtllm.settings import TrtllmSettings
from tests.conformance.engine_cases import EngineOptions, Make

FAKE = Path(__file__).resolve().parents[1] / "fakes" / "trtllm"
VOCABULARY = 512
LEASE_S = 3.0
"""The engine frees blocks that are not pulled only after this time, so tests wait for it."""


@contextmanager
def fake_tensorrt_llm() -> Iterator[None]:
    """Makes `import tensorrt_llm` import the stand-in while the context is open."""
    sys.path.insert(0, str(FAKE))
    try:
        yield
    finally:
        sys.path.remove(str(FAKE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


def write_model(folder: Path) -> Path:
    """Writes a model that the stand-in can serve: a configuration and a file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "eos_token_id": [2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


async def open_trtllm(stack: AsyncExitStack) -> Make:
    stack.enter_context(fake_tensorrt_llm())
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(feeds, "POLL_S", 0.01)
    model = write_model(Path(stack.enter_context(TemporaryDirectory())))

    def make(options: EngineOptions) -> Engine:
        lease_s = min(options.lease_s, LEASE_S)
        return TrtllmEngine(
            TrtllmSettings(
                model=str(model),
                role=options.role.value,
                lease_s=lease_s,
                pull_timeout_s=lease_s / 2,
                running_requests_max=options.running_requests_max,
                waiting_requests_max=options.waiting_requests_max,
                enable_lora=True,
            )
        )

    return make
