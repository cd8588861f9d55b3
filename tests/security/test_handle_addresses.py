"""A decode worker connects to the address that the registry lists for the prefill worker, not to an address in a handle."""

from dataclasses import replace
from typing import Any, cast

import pytest

from kvmesh.core import Generation, LegTask, SamplingParams
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.handles import HandleForm
from kvmesh.engines.vllm.handles import make_handle
from kvmesh.engines.vllm.intake import VllmIntake
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.kv.paths import KvPaths

FORM = HandleForm(format="vllm/1/nixl-1", compatibility_hash="abc", block_size_tokens=32, kv_bytes_per_block=10)
CLAIMED = "203.0.113.9"
PARAMETERS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "engine",
    "remote_request_id": "request~1",
    "remote_host": CLAIMED,
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
    "hold": {"index": 0, "number": 1, "addresses": [4096]},
}


@pytest.mark.parametrize("listed", ["10.0.0.2", ""])
def test_vllm_connects_to_the_registered_host(listed: str) -> None:
    """If the prefill worker is not listed, the decode worker connects to no address and computes the prompt itself."""
    paths = KvPaths(pull_timeout_s=5.0, own_host="10.0.0.1")
    if listed:
        paths.set_host("p1", listed)
    nothing = cast(Any, None)
    settings = VllmSettings(model="m")
    intake = VllmIntake(
        core=nothing, settings=settings, card=nothing, form=FORM, has_tokenizer=False, defaults={}, paths=paths
    )
    handle = make_handle(FORM, PARAMETERS, tokens=70, prompt="p", lease_s=30)
    request = EngineRequest(
        leg_id="leg",
        task=LegTask.GENERATE,
        generation=Generation(model="m", token_ids=[1] * 70, sampling=SamplingParams()),
        handle=replace(handle, worker_id="p1"),
        key=1,
    )
    parameters, cannot_be_pulled = intake._parameters(request, 70, "p")
    assert (parameters or {}).get("remote_host", "") == listed
    assert cannot_be_pulled == (not listed)
