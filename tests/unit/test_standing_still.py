"""A process that was suspended and resumed reads what arrived meanwhile before it judges other processes as silent."""

import asyncio
from typing import Any

import pytest

from kvmesh.clock import LATE_S, awake_timeout
from kvmesh.core import SamplingParams
from kvmesh.errors import DeadlineError, UnavailableError
from services.frontend.access.caller import ANYBODY
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import Request, RequestResult
from tests.frontend_mesh import FakeMesh, Faults, StaticModels, make_pipeline, served_model, tokens_of, write_model
from tests.unit.router_fleets import ask
from tests.unit.test_frontend_pipeline import RecordingOutlet
from tests.unit.test_router_link import LATENCY_S, Stage
from tests.virtual_loop import VirtualLoop, run_virtual

TEXT = "Hello! How are you today?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


def stand_still(duration_s: float) -> None:
    """Advances the time as if the process was suspended: due timers are late, and received messages are handled after them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stand_still(duration_s)


def run_with_suspension(
    model: ServedModel, *, after_s: float, still_s: float, timeout_s: float | None = None, faults: Faults | None = None
) -> tuple[RecordingOutlet, RequestResult | Exception]:
    """Runs one request with a token per second, and suspends the process once."""
    tokens = tokens_of(model.text, TEXT)
    mesh = FakeMesh(answer=lambda _: tokens, step_s=1.0, faults=faults or Faults())
    outlet = RecordingOutlet()

    async def main() -> RequestResult | Exception:
        pipeline = make_pipeline(mesh, StaticModels([model]), idle_timeout_s=5.0, first_token_timeout_s=3.0)
        request = Request(request_id="r", model="tiny", prompt="Hello", timeout_s=timeout_s, sampling=SamplingParams())
        prepared = await pipeline.prepare(request, model, caller=ANYBODY, began_s=0.0)
        asyncio.get_running_loop().call_later(after_s, stand_still, still_s)
        try:
            return await pipeline.run(prepared, outlet, began_s=0.0)
        except Exception as error:
            return error

    return outlet, run_virtual(main())


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5, 4.5], ids=["prefill", "first token", "decode", "later"])
def test_tokens_received_during_a_suspension_are_read_first(model: ServedModel, after_s: float) -> None:
    """Neither the timeout of the first token nor that between tokens expires, although both have passed on the clock."""
    outlet, answer = run_with_suspension(model, after_s=after_s, still_s=100.0)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}


def test_an_answer_received_before_its_deadline_is_read_afterwards(model: ServedModel) -> None:
    """The end of the answer arrived before the request's deadline and is read after it."""
    seconds = len(tokens_of(model.text, TEXT)) + 1
    outlet, answer = run_with_suspension(model, after_s=seconds - 0.5, still_s=50.0, timeout_s=seconds + 5.0)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}


def test_a_suspension_does_not_extend_the_deadline(model: ServedModel) -> None:
    """The request does not wait for tokens that have not arrived when the process resumes."""
    _, answer = run_with_suspension(model, after_s=2.5, still_s=50.0, timeout_s=10.0)
    assert isinstance(answer, DeadlineError)


def test_a_silent_worker_is_still_detected(model: ServedModel) -> None:
    """A suspension delays the idle timeout only once."""
    _, answer = run_with_suspension(model, after_s=4.5, still_s=50.0, faults=Faults(stalls_after=3))
    assert isinstance(answer, DeadlineError) and answer.reason == "idle_timeout"


def test_asks_are_placed_after_a_suspension(caplog: pytest.LogCaptureFixture) -> None:
    """After a suspension longer than the timeout of placements, the routers' answers are unread, and no router counts as hung."""

    async def main() -> None:
        async with Stage() as stage:
            asking = [asyncio.create_task(stage.place(f"r{i}")) for i in range(4)]
            await asyncio.sleep(LATENCY_S / 2)
            stand_still(60.0)
            await asyncio.gather(*asking)
            assert "router_stream_broken" not in caplog.text

    run_virtual(main())


def test_asks_are_placed_after_links_broke_during_a_suspension() -> None:
    """If the routers have closed the links, they are reopened within the time that a placement may take."""

    async def main() -> list[int]:
        async with Stage() as stage:
            for name in ("a", "b"):
                stage.network.partition(f"{name}:1")
            asking = [asyncio.create_task(stage.place(f"r{i}")) for i in range(4)]
            await asyncio.sleep(0.001)
            stand_still(60.0)
            for name in ("a", "b"):
                stage.network.kill(f"{name}:1")
                stage.network.heal(f"{name}:1")
            await asyncio.sleep(1.0)
            for name in ("a", "b"):
                await stage.serve(name)
            return await asyncio.gather(*asking)

    assert len(run_virtual(main())) == 4


def test_an_ask_without_a_router_ends_after_a_suspension() -> None:
    """The ask gets the time of one suspension back, and then fails because no router answered."""

    async def main() -> float:
        async with Stage() as stage:
            for name in ("a", "b"):
                stage.network.partition(f"{name}:1")
            began_s = asyncio.get_running_loop().time()
            asking = asyncio.create_task(stage.place("r"))
            await asyncio.sleep(0.001)
            stand_still(60.0)
            with pytest.raises(UnavailableError, match="no router answered in time"):
                await asking
            return asyncio.get_running_loop().time() - began_s

    assert run_virtual(main()) <= 81


def test_an_ask_does_not_outlive_its_request() -> None:
    """A request whose timeout passed during the suspension is not placed later."""

    async def main() -> float:
        async with Stage() as stage:
            for name in ("a", "b"):
                stage.network.partition(f"{name}:1")
            asking = asyncio.create_task(stage.link.place(ask("r", [1], timeout_s=5.0), timeout_s=5.0))
            await asyncio.sleep(0.001)
            stand_still(60.0)
            with pytest.raises(UnavailableError):
                await asking
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 63


def test_a_timeout_excludes_suspensions() -> None:
    """Work that fits in the timeout without the suspension finishes. Work that does not is still ended."""

    async def main(seconds: float) -> bool:
        async def work() -> None:
            for _ in range(int(seconds * 10)):
                await asyncio.sleep(0.1)

        asyncio.get_running_loop().call_later(1.05, stand_still, 60.0)
        try:
            async with awake_timeout(5.0):
                await work()
        except TimeoutError:
            return False
        return True

    assert run_virtual(main(3.0))
    assert not run_virtual(main(100.0))


def test_a_timeout_without_a_suspension_is_exact() -> None:
    """It ends a wait as `asyncio.timeout` does, and leaves no timer behind."""

    async def main() -> tuple[float, Any]:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with awake_timeout(5.0):
                await asyncio.sleep(1000)
        ended_s = loop.time()
        async with awake_timeout(5.0):
            await asyncio.sleep(1.0)
        await asyncio.sleep(100.0)
        return ended_s, LATE_S

    ended_s, _ = run_virtual(main())
    assert ended_s == pytest.approx(5.0)
