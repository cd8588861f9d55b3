"""The SGLang adapter with a scripted engine process: requests, results, and the loss of the process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvmesh.core import (
    Constraint,
    ConstraintKind,
    FinishReason,
    Generation,
    KvStored,
    LegTask,
    Rendezvous,
    Role,
    SamplingParams,
)
from kvmesh.engines.base import INTERNAL_SALT, EngineRequest, StepOutput
from kvmesh.engines.sglang import engine as engine_module
from kvmesh.engines.sglang import host_process, role_change
from kvmesh.engines.sglang.engine import SglangEngine
from kvmesh.engines.sglang.messages import (
    Alive,
    Begun,
    Call,
    CallResult,
    Cancel,
    Failed,
    Finished,
    FromHost,
    HostLoad,
    HostStep,
    Ready,
    Snapshot,
    Start,
    Submit,
    ToHost,
    frame,
    take_frames,
    to_host_decoder,
)
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.errors import (
    InternalError,
    InvalidRequestError,
    KvLostError,
    LostError,
    MeshError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from tests.patience import PATIENCE_S

READY = Ready(
    version="0.5.23",
    is_cpu=True,
    context_tokens_max=100,
    vocabulary_size=50,
    eos_token_ids=[1],
    sampling_defaults={"temperature": 0.5},
    block_size_tokens=16,
    kv_blocks_total=10,
    kv_bytes_per_token=64,
    running_requests_max=2,
    has_tokenizer=True,
    honors_seeds=True,
    is_embedding=False,
    compatibility_factors={"engine": "sglang"},
    bootstrap_port=0,
)
LOAD = HostLoad(
    step=1,
    step_s=0.01,
    running_requests=1,
    waiting_requests=2,
    waiting_prompt_tokens=30,
    kv_tokens_used=17,
    preempted_requests_total=0,
)
PROMPT = list(range(2, 22))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "TIMEOUT_S", PATIENCE_S)
    for name in ("SWITCH_TIMEOUT_S", "LEGS_TIMEOUT_S"):
        monkeypatch.setattr(role_change, name, PATIENCE_S)


class ScriptedHost:
    """The engine process, as a connection within this process. `received` are the adapter's messages."""

    def __init__(self, ready: FromHost = READY) -> None:
        self._ready = ready
        self.received: list[ToHost] = []
        self._ended: asyncio.Future[int] | None = None
        self._arrived = asyncio.Event()

    async def launch(self, arguments: Sequence[str]) -> "ScriptedHost":
        self._ended = asyncio.get_running_loop().create_future()
        self._reader, self._writer = await asyncio.open_unix_connection(arguments[0])
        self._task = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        data = bytearray()
        while received := await self._reader.read(65536):
            data += received
            for body in take_frames(data):
                self.received.append(to_host_decoder.decode(body))
                if isinstance(self.received[-1], Start):
                    self.send(self._ready)
            self._arrived.set()
        self.kill()

    def send(self, message: FromHost) -> None:
        self._writer.write(frame(message))

    async def wait_for(self, kind: type[Any]) -> Any:
        """Returns the newest message of a type, and waits for the first one."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [each for each in self.received if isinstance(each, kind)]):
                self._arrived.clear()
                await self._arrived.wait()
        return found[-1]

    def kill(self) -> None:
        self._writer.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(-9)

    async def wait(self) -> int:
        assert self._ended is not None
        return await asyncio.shield(self._ended)


class Rig:
    """A started engine with its scripted process."""

    def __init__(self, engine: SglangEngine, host: ScriptedHost) -> None:
        self.engine, self.host = engine, host
        self.steps = engine.steps()

    async def next(self) -> StepOutput:
        async with asyncio.timeout(PATIENCE_S):
            return await anext(self.steps)


Start_ = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def start() -> Start_:
    @contextlib.asynccontextmanager
    async def run(ready: FromHost = READY, **settings: Any) -> AsyncIterator[Rig]:
        host = ScriptedHost(ready)
        settings = {"model": "m", "has_kv_transfer": False, **settings}
        engine = SglangEngine(SglangSettings(**settings), launch=host.launch)
        try:
            await engine.start()
            yield Rig(engine, host)
        finally:
            await engine.aclose()

    return run


def request(
    key: int = 7, *, task: LegTask = LegTask.GENERATE, emitted: Sequence[int] = (), **more: Any
) -> EngineRequest:
    rendezvous = more.pop("rendezvous", None)
    generation = {name: more.pop(name) for name in ("adapter", "cache_salt", "priority") if name in more}
    return EngineRequest(
        key=key,
        leg_id=f"leg-{key}",
        task=task,
        rendezvous=rendezvous,
        generation=Generation(
            model="m", token_ids=PROMPT, emitted_token_ids=emitted, sampling=SamplingParams(**more), **generation
        ),
    )


async def submitted(rig: Rig, leg: EngineRequest) -> Submit:
    rig.engine.submit_nowait(leg)
    message = await rig.host.wait_for(Submit)
    assert isinstance(message, Submit)
    return message


class TestRequests:
    async def test_sampling_parameters_are_translated(self, start: Start_) -> None:
        """Parameters get SGLang's names and neutral values. The model's defaults apply where a request sets nothing."""
        async with start() as rig:
            sent = await submitted(
                rig,
                request(
                    max_tokens=9, min_tokens=2, top_k=0, seed=5, stop_token_ids=(3,), logit_bias=((4, 1.5),), priority=8
                ),
            )
        assert sent.sampling == {
            "temperature": 0.5,
            "top_k": -1,
            "sampling_seed": 5,
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "ignore_eos": False,
            "stop_token_ids": [3],
            "logit_bias": {"4": 1.5},
        }
        assert sent.priority == 8, "a larger priority is served first, in SGLang as in the mesh"

    async def test_a_request_without_a_seed_gets_one(self, start: Start_) -> None:
        """Otherwise equal requests would get equal answers."""
        async with start() as rig:
            first = (await submitted(rig, request(1))).sampling["sampling_seed"]
            rig.engine.submit_nowait(request(2))
            while (second := (await rig.host.wait_for(Submit)).sampling["sampling_seed"]) == first:
                await asyncio.sleep(0)
        assert first != second

    async def test_emitted_tokens_are_part_of_the_prompt(self, start: Start_) -> None:
        """They count towards the limits. A continuation with a seed is supported, but not one with penalties or a constraint."""
        async with start() as rig:
            sent = await submitted(rig, request(emitted=[5, 6], max_tokens=9, min_tokens=1, seed=1, prompt_logprobs=1))
            assert len(sent.token_ids) == 4 * (len(PROMPT) + 2)
            assert (sent.sampling["max_new_tokens"], sent.sampling["min_new_tokens"]) == (7, 0)
            assert sent.prompt_logprobs is None
            schema = Constraint(kind=ConstraintKind.JSON_OBJECT)
            for more in ({"repetition_penalty": 1.1}, {"presence_penalty": 1.0}, {"constraint": schema}):
                with pytest.raises(UnsupportedError):
                    rig.engine.submit_nowait(request(8, emitted=[5], **more))

    @pytest.mark.parametrize(
        ("constraint", "arguments"),
        [
            (Constraint(kind=ConstraintKind.JSON_SCHEMA, text="{}"), {"json_schema": "{}"}),
            (Constraint(kind=ConstraintKind.JSON_OBJECT), {"json_schema": '{"type": "object"}'}),
            (Constraint(kind=ConstraintKind.REGEX, text="a+"), {"regex": "a+"}),
            (Constraint(kind=ConstraintKind.GRAMMAR, text="root ::= x"), {"ebnf": "root ::= x"}),
            (Constraint(kind=ConstraintKind.CHOICE, options=("a", 'b"')), {"ebnf": r'root ::= "a" | "b\""'}),
            (Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text="{}"), {"structural_tag": "{}"}),
        ],
        ids=lambda value: value.kind if isinstance(value, Constraint) else "",
    )
    async def test_constraints_are_translated(
        self, start: Start_, constraint: Constraint, arguments: dict[str, str]
    ) -> None:
        async with start() as rig:
            sent = await submitted(rig, request(constraint=constraint))
        assert arguments.items() <= sent.sampling.items()

    @pytest.mark.parametrize(
        ("ready", "more", "field"),
        [
            ({"has_tokenizer": False}, {"constraint": Constraint(kind=ConstraintKind.JSON_OBJECT)}, "constraint"),
            ({"has_tokenizer": False}, {"min_tokens": 1}, "min_tokens"),
            ({}, {"min_p": 0.1}, "min_p"),
            ({"honors_seeds": False}, {"seed": 1}, "seed"),
            ({}, {"repetition_penalty": 3.0}, "repetition_penalty"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_unsupported_parameters_are_refused_by_field(
        self, start: Start_, ready: dict[str, Any], more: dict[str, Any], field: str
    ) -> None:
        async with start(_ready(**ready)) as rig:
            with pytest.raises(UnsupportedError) as caught:
                rig.engine.submit_nowait(request(**more))
            assert caught.value.field == f"generation.sampling.{field}"
            assert not [each for each in rig.host.received if isinstance(each, Submit)]

    async def test_an_engine_accepts_only_legs_of_its_mode(self, start: Start_) -> None:
        """An engine with KV transfer accepts only legs of its role, and only with a rendezvous. An engine without it accepts no rendezvous."""
        room = Rendezvous(host="h", port=1, room=2**62)
        async with start(has_kv_transfer=True, role="decode") as rig:
            assert rig.engine.describe().requires_prefill
            with pytest.raises(InvalidRequestError, match="rendezvous"):
                rig.engine.submit_nowait(request())
            with pytest.raises(UnsupportedError, match="mode decode"):
                rig.engine.submit_nowait(request(task=LegTask.PREFILL, rendezvous=room))
            sent = await submitted(rig, request(rendezvous=room))
            assert sent.meeting is not None and (sent.meeting.host, sent.meeting.room) == ("h", 2**62)
        async with start() as rig:
            assert not rig.engine.describe().requires_prefill
            assert rig.engine.describe().capabilities.handoffs == ()
            with pytest.raises(InvalidRequestError, match="takes no rendezvous"):
                rig.engine.submit_nowait(request(rendezvous=room))

    async def test_embeddings_generate_nothing(self, start: Start_) -> None:
        """Embedding requests have a limit of 0 tokens: generation would crash an embedding engine of SGLang."""
        async with start(_ready(is_embedding=True), is_embedding=True) as rig:
            sent = await submitted(rig, request(task=LegTask.EMBED))
            assert sent.is_embedding and sent.sampling["max_new_tokens"] == 0
            rig.host.send(
                HostStep(load=LOAD, finished=[Finished(number=sent.number, kind="length", embedding=[0.6, 0.8])])
            )
            (finish,) = (await rig.next()).finishes
            assert (finish.reason, finish.embedding) == (FinishReason.STOP, [0.6, 0.8])

    async def test_a_warm_up_uses_no_other_engine(self, start: Start_) -> None:
        """A warm-up request uses SGLang's fake address, which transfers nothing, and its tokens are not counted."""
        async with start(has_kv_transfer=True, role="decode") as rig:
            sent = await submitted(rig, request(cache_salt=INTERNAL_SALT))
            assert sent.meeting is not None and sent.meeting.host == "2.2.2.2"
            rig.host.send(
                HostStep(
                    load=LOAD, numbers=[sent.number], counts=[1], token_ids=[5], begun=[Begun(sent.number, 0, 0.0)]
                )
            )
            rig.host.send(HostStep(load=LOAD, finished=[Finished(number=sent.number, kind="length")]))
            await rig.next()
            await rig.next()
            load = rig.engine.load()
        assert load.prompt_tokens_total == load.output_tokens_total == load.transferred_tokens_total == 0

    async def test_requests_beyond_the_limit_are_refused(self, start: Start_) -> None:
        """The refusal has a retry delay."""
        async with start(waiting_requests_max=1) as rig:
            for key in range(3):
                rig.engine.submit_nowait(request(key))
            with pytest.raises(OverloadedError) as caught:
                rig.engine.submit_nowait(request(3))
            assert caught.value.retry_after_s


class TestResults:
    async def test_a_step_gives_tokens_finish_and_load(self, start: Start_) -> None:
        """The tokens of a step are assigned to the keys of the legs. The finish has the usage, and the load follows."""
        async with start() as rig:
            number = (await submitted(rig, request(logprobs=1))).number
            rig.host.send(
                HostStep(
                    load=LOAD,
                    numbers=[number],
                    counts=[2],
                    token_ids=[5, 6],
                    begun=[Begun(number, 16, 0.25)],
                    finished=[Finished(number=number, kind="stop", matched=6)],
                    logprobs={number: [(-1.0, [(5, -1.0), (9, -2.0)]), (-3.0, [(6, -3.0), (9, -4.0)])]},
                )
            )
            output = await rig.next()
            load = rig.engine.load()
        assert (output.keys, output.counts, output.token_ids) == ([7], [2], [5, 6])
        assert [each.alternatives for each in output.logprobs[7]] == [[(5, -1.0)], [(6, -3.0)]]
        (finish,) = output.finishes
        assert (finish.reason, finish.stop_token_id, finish.queue_s) == (FinishReason.STOP, 6, 0.25)
        assert (finish.usage.prompt_tokens, finish.usage.output_tokens, finish.usage.cached_tokens) == (20, 2, 16)
        assert (load.kv_blocks_used, load.kv_blocks_free, load.waiting_prompt_tokens) == (2, 8, 30)
        assert (load.prompt_tokens_total, load.cached_tokens_total, load.output_tokens_total) == (4, 16, 2)

    async def test_a_prefill_leg_has_no_tokens(self) -> None:
        """The decode engine emits the first token."""
        leg = request(task=LegTask.PREFILL, rendezvous=Rendezvous(host="h", port=1, room=3))
        host = ScriptedHost()
        engine = SglangEngine(SglangSettings(model="m", role="prefill"), launch=host.launch)
        starting = asyncio.create_task(engine.start())
        await host.wait_for(Start)
        while engine._ready is None:
            await asyncio.sleep(0)
        rig = Rig(engine, host)
        number = (await submitted(rig, leg)).number
        host.send(
            HostStep(
                load=LOAD,
                numbers=[number],
                counts=[1],
                token_ids=[5],
                finished=[Finished(number=number, kind="length")],
            )
        )
        output = await rig.next()
        starting.cancel()
        await asyncio.wait([starting])
        await engine.aclose()
        assert output.keys == [] and output.finishes[0].reason is FinishReason.HANDED_OFF

    @pytest.mark.parametrize(
        ("mode", "status", "error"),
        [
            ("null", 400, InvalidRequestError),
            ("null", 503, OverloadedError),
            ("null", 500, InternalError),
            ("decode", 500, KvLostError),
        ],
    )
    async def test_aborts_become_errors(self, start: Start_, mode: str, status: int, error: type[MeshError]) -> None:
        """SGLang reports failures as aborts with an HTTP status. With a handoff, a server error becomes KvLostError."""
        room = Rendezvous(host="h", port=1, room=3) if mode == "decode" else None
        async with start(has_kv_transfer=mode == "decode") as rig:
            number = (await submitted(rig, request(rendezvous=room))).number
            rig.host.send(
                HostStep(load=LOAD, finished=[Finished(number=number, kind="abort", message="why", status=status)])
            )
            (finish,) = (await rig.next()).finishes
        assert finish.reason is FinishReason.ERROR
        assert type(finish.error) is error and "why" in str(finish.error)

    async def test_a_cancelled_leg_frees_its_key(self, start: Start_) -> None:
        """A requested abort becomes CANCELLED. Later messages for the cancelled leg are ignored, and the key can be reused."""
        async with start() as rig:
            number = (await submitted(rig, request())).number
            rig.engine.cancel_nowait(7)
            rig.engine.cancel_nowait(99)
            assert (await rig.host.wait_for(Cancel)).number == number
            rig.host.send(HostStep(load=LOAD, finished=[Finished(number=number, kind="abort")]))
            assert (await rig.next()).finishes[0].reason is FinishReason.CANCELLED
            rig.host.send(
                HostStep(
                    load=LOAD,
                    numbers=[number],
                    counts=[1],
                    token_ids=[5],
                    finished=[Finished(number=number, kind="stop")],
                )
            )
            again = replace(request(), leg_id="again")
            rig.engine.submit_nowait(again)
            while (sent := await rig.host.wait_for(Submit)).number == number:
                await asyncio.sleep(0)
            rig.host.send(HostStep(load=LOAD, numbers=[sent.number], counts=[1], token_ids=[6]))
            assert (await rig.next()).token_ids == [6]

    async def test_kv_changes_become_events(self, start: Start_) -> None:
        async with start() as rig:
            events = rig.engine.kv_events()
            rig.host.send(HostStep(load=LOAD, kv_changes=[("stored", [11, 12], 3, "device")]))
            assert list(await anext(events)) == [KvStored(block_hashes=[11, 12], parent_hash=3)]

    async def test_a_slow_reader_of_events_gets_a_snapshot(
        self, start: Start_, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When the buffer of events is full, the adapter requests a snapshot once, which replaces the buffered events."""
        monkeypatch.setattr("kvmesh.engines.sglang.engine.KV_EVENT_BUFFER_BLOCKS", 1)
        async with start() as rig:
            rig.host.send(HostStep(load=LOAD, kv_changes=[("stored", [1, 2], None, "device")]))
            assert (await rig.host.wait_for(Call)).operation == "snapshot"
            rig.host.send(Snapshot([("cleared", [], None, ""), ("stored", [1, 2, 3], None, "device")]))
            batch = await anext(rig.engine.kv_events())
        assert batch[-1] == KvStored(block_hashes=[1, 2, 3])


class TestLife:
    async def test_a_failed_start_has_the_engines_reason(self, start: Start_) -> None:
        with pytest.raises(InvalidRequestError, match="no such model"):
            async with start(Failed("ValueError", "no such model")):
                pass

    async def test_a_missing_sglang_is_reported(self) -> None:
        """If the process ends before it connects, the error suggests that SGLang may not be installed."""
        engine = SglangEngine(SglangSettings(model="m", python="/bin/false"))
        with pytest.raises(UnavailableError, match="is SGLang installed"):
            await engine.start()

    async def test_the_death_of_the_process_is_reported(self, start: Start_) -> None:
        """The consumer of steps gets LostError, pending calls fail, and later legs are refused."""
        async with start() as rig:
            rig.engine.submit_nowait(request())
            resetting = asyncio.create_task(rig.engine.reset_cache())
            await rig.host.wait_for(Call)
            rig.host.kill()
            with pytest.raises(LostError):
                await rig.next()
            with pytest.raises(UnavailableError):
                await resetting
            with pytest.raises(UnavailableError, match="died"):
                rig.engine.submit_nowait(request(8))

    async def test_reset_cache(self, start: Start_) -> None:
        async with start() as rig:
            resetting = asyncio.create_task(rig.engine.reset_cache())
            call = await rig.host.wait_for(Call)
            rig.host.send(CallResult(call.call_id, True))
            assert await resetting

    async def test_close_cancels_legs(self, start: Start_) -> None:
        async with start() as rig:
            rig.engine.submit_nowait(request())
            await rig.engine.aclose()
            assert (await rig.next()).finishes[0].reason is FinishReason.CANCELLED
            with pytest.raises(StopAsyncIteration):
                await anext(rig.steps)

    async def test_role_is_fixed(self, start: Start_) -> None:
        async with start() as rig:
            await rig.engine.set_role(Role.DECODE)
            with pytest.raises(UnsupportedError):
                await rig.engine.set_role(Role.PREFILL)


@contextlib.asynccontextmanager
async def bootstrap_server(statuses: Iterator[int]) -> AsyncIterator[int]:
    """Answers topology requests with these statuses, and then always with the last one. Yields its port."""
    status = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal status
        assert request.query["prefill_dp_rank"] == "-1"
        status = next(statuses, status)
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_get("/route", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
async def route() -> AsyncIterator[int]:
    """The port of a bootstrap server whose ranks are registered."""
    async with bootstrap_server(iter([200])) as port:
        yield port


class TestReadiness:
    """SGLang's prefill engine reports ready even if it failed to register with its bootstrap server, so the adapter checks."""

    async def test_start_waits_for_the_registration(self, start: Start_) -> None:
        polled = iter([404, 500, 200])
        async with (
            bootstrap_server(polled) as port,
            start(_ready(bootstrap_port=port), has_kv_transfer=True, role="prefill") as rig,
        ):
            assert next(polled, None) is None, "the adapter polls until the ranks are registered"
            assert rig.engine.describe().rendezvous_address == f"127.0.0.1:{port}"

    async def test_an_engine_that_never_registers_fails_to_start(
        self, start: Start_, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_process, "TIMEOUT_S", 0.3)
        async with bootstrap_server(iter([404])) as port:
            with pytest.raises(UnavailableError, match="did not register") as raised:
                async with start(_ready(bootstrap_port=port), has_kv_transfer=True, role="prefill"):
                    pass
        assert raised.value.reason == "engine_start_failed"


SWITCHING = {"can_switch_role": True, "has_kv_transfer": True, "role": "decode"}


class TestRoleChange:
    async def answer(self, rig: Rig, calls: int, *, is_done: bool = True) -> None:
        """Sends the scheduler's response to the call with this number."""
        async with asyncio.timeout(PATIENCE_S):
            while len(received := [each for each in rig.host.received if isinstance(each, Call)]) < calls:
                await asyncio.sleep(0.01)
        assert (received[-1].operation, tuple(received[-1].arguments)) == ("set_role", ("prefill",))
        rig.host.send(CallResult(received[-1].call_id, is_done, "" if is_done else "requests run"))

    async def test_a_role_change_waits_for_legs_and_the_scheduler(
        self, start: Start_, route: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """New legs are refused meanwhile. Afterwards the description of the engine is that of the new role."""
        monkeypatch.setattr(engine_module, "ROLE_WAIT_S", PATIENCE_S)
        async with start(_ready(bootstrap_port=route), **SWITCHING) as rig:
            before = rig.engine.describe()
            assert before.capabilities.roles == (Role.PREFILL, Role.DECODE) and before.requires_prefill
            assert not before.rendezvous_address, "a decode worker has no rendezvous address"
            room = Rendezvous(host="h", port=1, room=2)
            sent = await submitted(rig, request(rendezvous=room))
            changing = asyncio.create_task(rig.engine.set_role(Role.PREFILL))
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError) as refused:
                rig.engine.submit_nowait(request(8, rendezvous=room))
            assert refused.value.reason == "role_changed"
            assert not any(isinstance(each, Call) for each in rig.host.received), (
                "the scheduler is not called while the leg runs"
            )
            rig.host.send(HostStep(load=LOAD, finished=[Finished(number=sent.number, kind="stop")]))
            assert (await rig.next()).finishes[0].reason is FinishReason.STOP
            await self.answer(rig, 1, is_done=False)
            await self.answer(rig, 2)
            await changing
            after = rig.engine.describe()
            assert (after.role, after.requires_prefill) == (Role.PREFILL, False)
            assert after.rendezvous_address == f"127.0.0.1:{route}"
            assert after.kv_compatibility_hash == before.kv_compatibility_hash
            with pytest.raises(UnsupportedError):
                rig.engine.submit_nowait(request(9, rendezvous=room))
            rig.engine.submit_nowait(request(9, task=LegTask.PREFILL, rendezvous=room))

    async def test_a_role_change_cancels_long_legs(
        self, start: Start_, route: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_module, "ROLE_WAIT_S", 0)
        async with start(_ready(bootstrap_port=route), **SWITCHING) as rig:
            sent = await submitted(rig, request(rendezvous=Rendezvous(host="h", port=1, room=2)))
            changing = asyncio.create_task(rig.engine.set_role(Role.PREFILL))
            assert (await rig.host.wait_for(Cancel)).number == sent.number
            rig.host.send(HostStep(load=LOAD, finished=[Finished(number=sent.number, kind="abort")]))
            finish = (await rig.next()).finishes[0]
            assert isinstance(finish.error, LostError) and finish.error.reason == "role_changed"
            await self.answer(rig, 1)
            await changing

    async def test_a_cancelled_change_keeps_the_role(self, start: Start_, route: int) -> None:
        async with start(_ready(bootstrap_port=route), **SWITCHING) as rig:
            room = Rendezvous(host="h", port=1, room=2)
            rig.engine.submit_nowait(request(rendezvous=room))
            changing = asyncio.create_task(rig.engine.set_role(Role.PREFILL))
            await asyncio.sleep(0)
            changing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await changing
            assert rig.engine.describe().role is Role.DECODE
            rig.engine.submit_nowait(request(8, rendezvous=room))

    def test_a_role_change_needs_nixl(self) -> None:
        for settings in ({"transfer_backend": "mooncake"}, {"has_kv_transfer": False}):
            with pytest.raises(InvalidRequestError):
                SglangSettings(model="m", can_switch_role=True, **settings)  # type: ignore[arg-type]


def test_frames_may_be_split_anywhere() -> None:
    data = frame(Cancel(1)) + frame(Cancel(2))
    for cut in range(len(data)):
        received, numbers = bytearray(), []
        for piece in (data[:cut], data[cut:]):
            received += piece
            numbers += [to_host_decoder.decode(body).number for body in take_frames(received)]
        assert numbers == [1, 2] and not received


def _ready(**changes: Any) -> Ready:
    return Ready(**{name: getattr(READY, name) for name in READY.__struct_fields__} | changes)


async def test_a_silent_process_is_not_responsive(start: Start_, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is responsive again with the next message of its process."""
    monkeypatch.setattr(engine_module, "SILENCE_S", 0.05)
    async with start() as rig, asyncio.timeout(PATIENCE_S):
        while rig.engine.is_responsive:
            await asyncio.sleep(0.005)
        while not rig.engine.is_responsive:
            rig.host.send(Alive())
            await asyncio.sleep(0.005)
