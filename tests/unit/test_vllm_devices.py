"""Arguments of vLLM on a GPU, and how the engine's thread waits for transfers. No test here needs vLLM, except the last."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.engines.vllm.arguments import cpu_arguments, gpu_arguments
from kvmesh.engines.vllm.core import reports_transfer
from kvmesh.engines.vllm.description import capabilities, ranks_factor
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.engines.vllm.thread import FIRST_PAUSE_S, PULL_PAUSE_S, IdlePauses


def test_vllms_defaults_are_kept_on_a_gpu() -> None:
    """vLLM chooses the number of requests and the tokens of a step by the device's memory. Settings of the operator override them."""
    values = gpu_arguments(VllmSettings(model="m"))
    assert not {"max_num_seqs", "max_num_batched_tokens", "device_ids", "block_size"} & set(values)
    values = gpu_arguments(VllmSettings(model="m", running_requests_max=7, device_ids=("2", "3")))
    assert (values["max_num_seqs"], values["device_ids"]) == (7, [2, 3])
    assert gpu_arguments(VllmSettings(model="m", device_ids=("GPU-1",)))["device_ids"] == ["GPU-1"]
    assert cpu_arguments(VllmSettings(model="m"))["max_num_seqs"] == 64


def test_pauses_double_and_stay_short_during_a_pull() -> None:
    """Only a step notices a finished pull."""
    pauses = IdlePauses(0.005)
    idle = [pauses.after_step(is_active=False, is_pulling=False) for _ in range(6)]
    assert idle == pytest.approx([0.0006, 0.0012, 0.0024, 0.0048, 0.005, 0.005])
    assert pauses.after_step(is_active=False, is_pulling=True) == PULL_PAUSE_S
    assert pauses.after_step(is_active=True, is_pulling=True) == 0.0
    assert pauses.after_step(is_active=False, is_pulling=True) == 2 * FIRST_PAUSE_S
    assert IdlePauses(0.0005).after_step(is_active=False, is_pulling=True) == 0.0005


def batch(**report: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    values = {"finished_recving": None, "finished_sending": None, **report}
    future.set_result(SimpleNamespace(kv_connector_output=SimpleNamespace(**values)))
    return future


def test_a_queued_batch_that_reports_a_transfer_is_detected() -> None:
    """With asynchronous scheduling, its step would otherwise follow after a pause."""
    assert reports_transfer(batch(finished_recving={"a"}))
    assert reports_transfer(batch(finished_sending={"a"}))
    assert not reports_transfer(batch())
    running: Future[Any] = Future()
    assert not reports_transfer(running)
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("no"))
    assert reports_transfer(failed)
    nothing: Future[Any] = Future()
    nothing.set_result(None)
    assert not reports_transfer(nothing)


def parallel(tensor: int, pipeline: int = 1, context: int = 1) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, decode_context_parallel_size=context
    )


def test_unequal_ranks_are_compatible_if_the_connector_supports_them() -> None:
    """One number of ranks must divide the other, and the model's heads must be splittable. Pipeline and context sizes must be equal."""
    split = [ranks_factor(parallel(size), splits_heads=True) for size in (1, 2, 4, 8)]
    assert len(set(split)) == 1
    assert ranks_factor(parallel(3), splits_heads=True) not in split
    assert ranks_factor(parallel(2, pipeline=2), splits_heads=True) not in split
    assert ranks_factor(parallel(2, context=2), splits_heads=True) not in split
    whole = [ranks_factor(parallel(size), splits_heads=False) for size in (1, 2)]
    assert len({*whole, split[0]}) == 3


@pytest.mark.parametrize(
    ("role", "can_switch", "roles"), [("prefill", False, 2), ("decode", False, 1), ("decode", True, 2)]
)
def test_a_prefill_engine_can_decode_what_it_computed(role: str, can_switch: bool, roles: int) -> None:
    """It answers requests for a single token, so it has both roles."""
    pytest.importorskip("vllm.version")
    settings = VllmSettings(model="m", role=role, can_switch_role=can_switch)
    assert len(capabilities(settings, has_tokenizer=False).roles) == roles
