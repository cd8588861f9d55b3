"""The TensorRT-LLM adapter on the stand-in of the engine, beyond the conformance suite."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, LegTask, Rendezvous, SamplingParams
from kvmesh.engines.trtllm.arguments import check_launcher, engine_arguments
from kvmesh.engines.trtllm.engine import TrtllmEngine
from kvmesh.engines.trtllm.sampling import guided_decoding, request_priority
from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.errors import InvalidRequestError, KvLostError, LostError, UnavailableError, UnsupportedError
from tests.conformance.engine_driver import EngineDriver, greedy
from tests.conformance.trtllm_case import fake_tensorrt_llm, write_model
from tests.patience import PATIENCE_S

PROMPT = list(range(10, 110))
Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines on the stand-in."""
    async with AsyncExitStack() as stack:
        stack.enter_context(fake_tensorrt_llm())
        model = str(write_model(tmp_path))

        async def one(**changes: Any) -> EngineDriver:
            settings = TrtllmSettings(model=model, lease_s=2 * PATIENCE_S, pull_timeout_s=PATIENCE_S)
            driver = EngineDriver(TrtllmEngine(replace(settings, **changes)), PATIENCE_S)
            stack.push_async_callback(driver.aclose)
            return await driver.start()

        yield one


def generation(**sampling: Any) -> Generation:
    return greedy("any", PROMPT, 12, **sampling)


def executor(driver: EngineDriver) -> Any:
    return driver.engine._llm._executor  # type: ignore[attr-defined]


def test_ranks_on_several_machines_need_the_launcher() -> None:
    """Without the launcher MPI would start one worker per rank, and the mesh needs only that of rank 0."""
    settings = TrtllmSettings(model="any", tensor_parallel_size=8, pipeline_parallel_size=2, gpus_per_node=8)
    assert engine_arguments(settings)["gpus_per_node"] == 8
    with pytest.raises(InvalidRequestError, match="trtllm-llmapi-launch") as raised:
        check_launcher(settings, {})
    assert raised.value.field == "gpus_per_node"
    check_launcher(settings, {"TLLM_SPAWN_PROXY_PROCESS": "1"})
    for alone in (replace(settings, pipeline_parallel_size=1), replace(settings, gpus_per_node=0)):
        check_launcher(alone, {})


async def test_the_first_token_is_emitted_once(start: Start) -> None:
    """The handle carries the first token, and the decode engine emits it."""
    prefill, decode, alone = await start(role="prefill"), await start(), await start()
    handle = await prefill.prefill(generation())
    whole = (await alone.run(generation())).tokens
    assert list(handle.first_token_ids) == whole[:1]
    assert (await decode.run(generation(), handle=handle)).tokens == whole


async def test_another_first_token_fails_the_leg(start: Start) -> None:
    """If the decode engine does not start with the token of the handle, its answer would be wrong."""
    prefill, decode = await start(role="prefill"), await start()
    handle = await prefill.prefill(generation())
    record = decode.submit(generation(), handle=handle)
    (leg,) = decode.engine._streams.legs.values()
    leg.request = replace(leg.request, handle=replace(handle, first_token_ids=(handle.first_token_ids[0] + 1,)))
    done = (await decode.wait(record)).done
    assert done.error is not None and done.error.reason == "first_token_mismatch" and record.tokens == []
    await decode.wait_blocks(0, PATIENCE_S)


async def test_every_early_end_aborts_the_request(start: Start) -> None:
    """If the adapter finds a stop, a leg is cancelled, or the engine closes, the request is aborted in the engine."""
    driver = await start()
    whole = (await driver.run(generation())).tokens
    # With `min_tokens` the adapter handles stop tokens itself.
    record = await driver.run(generation(stop_token_ids=(whole[5],), min_tokens=2))
    assert (record.done.reason, record.done.stop_token_id) == (FinishReason.STOP, whole[5])
    await driver.wait_blocks(0, PATIENCE_S)
    cancelled = await driver.wait_tokens(driver.submit(greedy("any", PROMPT, 500)), 2)
    driver.engine.cancel_nowait(cancelled.key)
    assert (await driver.wait(cancelled)).done.reason is FinishReason.CANCELLED
    running = executor(driver)
    record = await driver.wait_tokens(driver.submit(greedy("any", PROMPT, 500)), 1)
    request = next(iter(running._live.values()))
    await driver.aclose()
    assert record.done.reason is FinishReason.CANCELLED and request.is_aborted


@pytest.mark.parametrize("has_result", [False, True])
async def test_a_dead_engine_ends_its_streams(start: Start, has_result: bool) -> None:
    """`steps` raises LostError, and new requests are refused. Legs have no finish, so that frontends continue them elsewhere, also if a last
    result arrives together with the failure."""
    driver = await start()
    record = await driver.wait_tokens(driver.submit(greedy("any", PROMPT, 500)), 1)
    if has_result:
        executor(driver)._step()
    executor(driver).die()
    await driver._tasks[0]
    assert isinstance(driver.error, LostError) and record.finish is None
    with pytest.raises(UnavailableError):
        driver.submit(generation())


async def test_generation_first_uses_a_rendezvous(start: Start) -> None:
    """Both legs start at once. The room is the engine's request id, and the endpoint of the prefill engine is the rendezvous address."""
    prefill = await start(role="prefill", schedule_style="generation_first")
    decode, alone = await start(schedule_style="generation_first"), await start()
    host, _, port = prefill.engine.describe().rendezvous_address.rpartition(":")
    where = Rendezvous(host=host, port=int(port), room=2**62 + 1)
    second = decode.submit(generation(), rendezvous=where)
    first = prefill.submit(generation(), task=LegTask.PREFILL, rendezvous=where)
    assert (await prefill.wait(first)).done.reason is FinishReason.HANDED_OFF and first.done.handle is None
    assert (await decode.wait(second)).tokens == (await alone.run(generation())).tokens
    assert second.done.usage.transferred_tokens == len(PROMPT)


async def test_a_rendezvous_without_a_prefill_leg_fails(start: Start) -> None:
    """The leg fails with KvLostError instead of computing the prompt."""
    decode = await start(schedule_style="generation_first", pull_timeout_s=0.1)
    record = decode.submit(generation(), rendezvous=Rendezvous(host="127.0.0.1", port=1, room=5))
    done = (await decode.wait(record)).done
    assert isinstance(done.error, KvLostError)
    await decode.wait_blocks(0, PATIENCE_S)


async def test_rank_and_priority_are_passed_on(start: Start) -> None:
    """The engine gets the attention data-parallel rank and the priority. An unknown rank is refused."""
    driver = await start(enable_attention_dp=True, tensor_parallel_size=2)
    await driver.run(replace(generation(), data_parallel_rank=1, priority=100))
    sent = executor(driver).log[-1]
    assert (sent["scheduling"].attention_dp_rank, sent["scheduling"].attention_dp_relax) == (1, False)
    assert sent["priority"] == 1.0
    with pytest.raises(UnsupportedError, match="data_parallel_rank"):
        driver.submit(replace(generation(), data_parallel_rank=2))


async def test_structured_output_needs_a_tokenizer(start: Start) -> None:
    constraint = Constraint(kind=ConstraintKind.JSON_OBJECT)
    with pytest.raises(UnsupportedError, match="tokenizer"):
        (await start()).submit(generation(constraint=constraint))
    driver = await start(tokenizer="load")
    await driver.run(generation(constraint=constraint))
    assert executor(driver).log[-1]["params"].guided_decoding.json_object


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (ConstraintKind.JSON_SCHEMA, "{}", {"json": "{}"}),
        (ConstraintKind.REGEX, "a+", {"regex": "a+"}),
        (ConstraintKind.GRAMMAR, "root ::= x", {"grammar": "root ::= x"}),
        (ConstraintKind.STRUCTURAL_TAG, "{}", {"structural_tag": "{}"}),
        (ConstraintKind.CHOICE, "", {"regex": r"a\.b|c"}),
    ],
)
def test_constraints_are_translated(kind: ConstraintKind, text: str, expected: dict[str, str]) -> None:
    options = ("a.b", "c") if kind is ConstraintKind.CHOICE else ()
    with fake_tensorrt_llm():
        found = guided_decoding(Constraint(kind=kind, text=text, options=options))
    assert {name: getattr(found, name) for name in expected} == expected


def test_priorities_are_scaled() -> None:
    assert [request_priority(each) for each in (-100, 0, 100)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("sampling", [{"seed": 3, "temperature": 0.7}, {"presence_penalty": 0.5}])
async def test_unsupported_continuations_are_refused(start: Start, sampling: dict[str, Any]) -> None:
    """The error names the field."""
    asked = replace(generation(), sampling=SamplingParams(max_tokens=9, **sampling), emitted_token_ids=(1, 2))
    with pytest.raises(UnsupportedError) as caught:
        (await start()).submit(asked)
    assert caught.value.field == f"generation.sampling.{next(iter(sampling))}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_transfer_limit_is_the_mesh_deadline(role: str) -> None:
    """A prefill engine keeps blocks for the lease, and a decode engine pulls for at most the pull timeout. The backend is always set."""
    arguments = engine_arguments(TrtllmSettings(model="any", role=role, lease_s=7.5, pull_timeout_s=1.5))
    limit_ms = {"prefill": 7500, "decode": 1500}[role]
    assert arguments["cache_transceiver_config"] == {"backend": "NIXL", "kv_transfer_timeout_ms": limit_ms}


def test_arguments_are_passed_through_or_refused_with_the_reason() -> None:
    """Mappings are merged. An argument that has a setting is refused, and the error names the setting."""
    settings = TrtllmSettings(model="any", engine_arguments={"kv_cache_config": {"dtype": "fp8"}, "pp_partition": [1]})
    arguments = engine_arguments(settings)
    assert arguments["kv_cache_config"]["tokens_per_block"] == 32 and arguments["kv_cache_config"]["dtype"] == "fp8"
    assert arguments["pp_partition"] == [1]
    refused = replace(settings, engine_arguments={"kv_cache_config": {"tokens_per_block": 64}})
    with pytest.raises(InvalidRequestError, match="tokens_per_block: use block_size_tokens"):
        engine_arguments(refused)


async def test_a_missing_engine_is_reported() -> None:
    """The error is a single line, which `kvmesh up` prints."""
    with pytest.raises(UnavailableError, match="TensorRT-LLM is not installed here") as caught:
        await TrtllmEngine(TrtllmSettings(model="any")).start()
    assert "\n" not in str(caught.value) and caught.value.reason == "engine_missing"
