"""KV paths in a whole mesh on virtual time: what a failing path costs, and how soon the mesh uses it again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvmesh.core import FailingKvPath, Role, SamplingParams, WorkerRef
from kvmesh.errors import UnsupportedError
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.simulation.virtual_loop import VirtualLoop
from kvmesh.worker.kv_checks import CHECKS_MAX, PREFILL_TIMEOUT_S
from kvmesh.worker.warm_up import WarmUp
from services.frontend.pipeline.request import Request
from services.simulation.frontend import MODEL
from services.simulation.ledger import Ledger
from services.simulation.mesh import MeshShape, default_engine
from services.simulation.worker import SimulatedWorker
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

FIRST_S, HEAL_S = 2.0, 5.0
"""The promised bounds: the delay of the first request that meets a failing path, and the time from the end of a failure until the path works
again."""
QUICK_S = 0.3
PREFILL = "prefill-0"


def uncached_request(name: str) -> Request:
    """Returns a request whose prompt is in no cache."""
    prompt = list(Random(name).randbytes(200))
    return Request(request_id=name, model=MODEL, prompt=prompt, sampling=SamplingParams(max_tokens=8))


def run_scenario(shape: MeshShape, scenario: Callable[[ScriptedMesh], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        mesh = ScriptedMesh(5, shape)
        await mesh.start()
        await scenario(mesh)
        await mesh.aclose()

    run_virtual(run())


async def run_all(mesh: ScriptedMesh, names: Sequence[str]) -> list[Ledger]:
    ledgers = [await mesh.request(uncached_request(name)) for name in names]
    assert not [ledger.error for ledger in ledgers if ledger.error is not None]
    return ledgers


def elapsed_s(ledger: Ledger) -> float:
    return ledger.ended_s - ledger.arrived_s


def decode_of(mesh: ScriptedMesh) -> SimulatedWorker:
    return mesh.workers["decode-0"]


def usage(worker: SimulatedWorker) -> tuple[int, ...]:
    """Returns the counters that operators read as work done for clients."""
    load = worker.worker.engine.load()
    return load.prompt_tokens_total, load.output_tokens_total, load.cached_tokens_total, load.transferred_tokens_total


async def until(condition: Callable[[], object], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_failing_path_delays_one_request_and_no_other() -> None:
    """The decode worker gives up the first hanging pull after the path's own limit. It computes later prompts itself without delay. Checks
    notice the end of the failure, and the worker pulls KV again."""

    async def scenario(mesh: ScriptedMesh) -> None:
        decode = decode_of(mesh)
        paths, network = decode.engine.kv_paths, mesh.world.kv_network
        await run_all(mesh, ["warm1", "warm2"])
        network.hangs_pulls = True
        first, *others = await run_all(mesh, [f"cut{number}" for number in range(12)])
        assert QUICK_S < elapsed_s(first) < FIRST_S
        assert max(map(elapsed_s, others)) < QUICK_S
        load = decode.worker.engine.load()
        assert load.failing_kv_paths == [FailingKvPath(worker_id=PREFILL, reason="timed_out")]
        failed = load.failed_handoffs_total  # Pulls fail until the router stops pairing the two.
        assert 1 <= failed < 6 and load.recomputed_tokens_total == failed * 200
        network.hangs_pulls = False
        await until(lambda: not paths.failing(), HEAL_S)
        await asyncio.sleep(1.0)  # The next load record informs the router.
        before = decode.engine.load().transferred_tokens_total
        await run_all(mesh, ["healed"])
        assert decode.engine.load().transferred_tokens_total >= before + 190
        assert decode.worker.engine.load().failed_handoffs_total == failed

    run_scenario(MeshShape(prefill=1, decode=1), scenario)


def test_a_check_whose_handle_was_not_received_leaves_no_lease() -> None:
    """The machine is suspended while the handle is in flight, so that the check times out before it knows the handle. The lease is still
    released."""

    async def scenario(mesh: ScriptedMesh) -> None:
        prefill, decode = mesh.workers[PREFILL], decode_of(mesh)
        await asyncio.sleep(2.0)  # The checks at the worker's start have ended.
        source = WorkerRef(worker_id=PREFILL, address=prefill.address, epoch=1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for moment in range(30):
            check = asyncio.create_task(decode.checks.check(source))
            while not len(prefill.engine.scheduler.leases):
                await asyncio.sleep(0.0001)
            await asyncio.sleep(moment * 0.0003)
            loop.stand_still(PREFILL_TIMEOUT_S + 1.0)
            await check
            await asyncio.sleep(0.1)
            assert not len(prefill.engine.scheduler.leases), moment

    run_scenario(MeshShape(prefill=1, decode=1, engine=default_engine(lease_s=60.0)), scenario)


def test_a_worker_that_changed_its_role_checks_paths() -> None:
    """A worker that became a decode worker notices that a failing path works again. A worker that became a prefill worker is not its own
    source."""

    async def scenario(mesh: ScriptedMesh) -> None:
        moved, network = mesh.workers["prefill-1"], mesh.world.kv_network
        await moved.membership.set_role(Role.DECODE)
        await mesh.workers["decode-0"].membership.set_role(Role.PREFILL)
        await asyncio.sleep(5.0)
        assert sorted(mesh.workers["decode-0"].checks._sources) == ["prefill-0"]
        network.hangs_pulls = True
        ledger = await mesh.request(replace(uncached_request("cut"), pinned_decode_worker_id="prefill-1"))
        assert ledger.error is None and moved.engine.kv_paths.failing()
        network.hangs_pulls = False
        await until(lambda: not moved.engine.kv_paths.failing(), HEAL_S)

    run_scenario(MeshShape(prefill=2, decode=2), scenario)


def test_a_new_prefill_worker_is_checked_before_a_request_uses_it() -> None:
    """Each decode worker checks its path to a new prefill worker. If the KV network fails, the path is known to fail before any request."""

    async def scenario(mesh: ScriptedMesh) -> None:
        decodes = [mesh.workers[f"decode-{number}"] for number in range(2)]
        for decode in decodes:
            await until(decode.engine.kv_paths.paths, 5.0)
            [path] = decode.engine.kv_paths.paths()
            assert (path.worker_id, path.pulls_total, path.failures_total) == (PREFILL, 1, 0)
        mesh.world.kv_network.fails_pulls = True
        await mesh.start_worker("prefill-1", decodes[0].role.PREFILL)
        for decode in decodes:
            await until(decode.engine.kv_paths.failing, 5.0)
            assert decode.worker.engine.load().failing_kv_paths == [
                FailingKvPath(worker_id="prefill-1", reason="unreachable")
            ]
            assert decode.worker.engine.load().failed_handoffs_total == 0

    run_scenario(MeshShape(prefill=1, decode=2), scenario)


def test_checks_leave_few_blocks_behind_and_count_no_tokens() -> None:
    """Repeated checks of a failing path add no cached blocks, because all checks use the same prompt. Checks are not counted as work for
    clients, whether they fail or succeed."""

    async def scenario(mesh: ScriptedMesh) -> None:
        mesh.world.kv_network.fails_pulls = True
        await run_all(mesh, ["one"])
        await asyncio.sleep(10.0)
        cached = [len(each.engine.scheduler.pool.cached_names()) for each in mesh.workers.values()]
        counted = [usage(worker) for worker in mesh.workers.values()]
        await asyncio.sleep(60.0)
        assert [len(each.engine.scheduler.pool.cached_names()) for each in mesh.workers.values()] == cached
        assert [usage(worker) for worker in mesh.workers.values()] == counted
        assert decode_of(mesh).engine.kv_paths.paths()[0].failures_total > 20
        assert decode_of(mesh).worker.engine.load().failed_handoffs_total == 1
        before = [usage(worker) for worker in mesh.workers.values()]
        mesh.world.kv_network.fails_pulls = False
        await until(lambda: not decode_of(mesh).engine.kv_paths.failing(), HEAL_S)
        assert [usage(worker) for worker in mesh.workers.values()] == before

    run_scenario(MeshShape(prefill=1, decode=1), scenario)


def test_background_checks_are_bounded() -> None:
    """With twelve new prefill workers, a decode worker runs at most CHECKS_MAX checks at a time, and checks all of them."""

    async def scenario(mesh: ScriptedMesh) -> None:
        decode, most = decode_of(mesh), 0
        async with asyncio.timeout(30.0):
            while len(decode.engine.kv_paths.paths()) < 12:
                most = max(most, len(decode.checks._running))
                await asyncio.sleep(0.001)
        assert 1 <= most <= CHECKS_MAX

    run_scenario(MeshShape(prefill=12, decode=1), scenario)


def test_a_check_on_request() -> None:
    """The RPC reports a working path, a failing pull and a source that does not answer. Prefill workers reject the RPC."""

    async def scenario(mesh: ScriptedMesh) -> None:
        pool = mesh.world.network.pool()
        client, decode = GrpcWorkerClient(pool), decode_of(mesh)
        source = WorkerRef(worker_id=PREFILL, address=mesh.workers[PREFILL].address, epoch=1)
        checked = await client.check_kv_path(decode.address, source, timeout_s=10.0)
        assert checked.is_ok and not checked.reason and checked.elapsed_s > 0
        mesh.world.kv_network.fails_pulls = True
        checked = await client.check_kv_path(decode.address, source, timeout_s=10.0)
        assert not checked.is_ok and checked.reason == "unreachable" and PREFILL in checked.detail
        [path] = await client.list_kv_paths(decode.address, timeout_s=10.0)
        assert path.worker_id == PREFILL and path.failures_total >= 1 and path.reason == "unreachable"
        assert path.last_failure_at_s is not None and path.detail == checked.detail
        mesh.partition(PREFILL)
        checked = await client.check_kv_path(decode.address, source, timeout_s=10.0)
        assert not checked.is_ok and checked.reason == "unreachable" and checked.elapsed_s < PREFILL_TIMEOUT_S + 1
        mesh.heal(PREFILL)
        with pytest.raises(UnsupportedError):
            await client.check_kv_path(source.address, source, timeout_s=10.0)
        assert await client.list_kv_paths(source.address, timeout_s=10.0) == []
        await pool.aclose()

    run_scenario(MeshShape(prefill=1, decode=1), scenario)


def test_a_check_does_not_override_the_registered_address() -> None:
    """A caller of the RPC may claim another address for a worker's id. Pulls continue to use the address in the registry."""

    async def scenario(mesh: ScriptedMesh) -> None:
        await run_all(mesh, ["first"])
        pool = mesh.world.network.pool()
        client, decode = GrpcWorkerClient(pool), decode_of(mesh)
        listed = decode.engine.kv_paths.host_of(PREFILL)
        claimed = WorkerRef(worker_id=PREFILL, address="203.0.113.9:1", epoch=1)
        checked = await client.check_kv_path(decode.address, claimed, timeout_s=10.0)
        assert not checked.is_ok
        assert listed and decode.engine.kv_paths.host_of(PREFILL) == listed
        await pool.aclose()

    run_scenario(MeshShape(prefill=1, decode=1), scenario)


@pytest.mark.parametrize("worker_id", ["decode-0", PREFILL])
def test_the_warm_up_leaves_no_leases(worker_id: str) -> None:
    """The warm-up leaves no leases and only the blocks of a check. A failed check does not stop the start."""

    async def scenario(mesh: ScriptedMesh) -> None:
        for fails in (False, True):
            mesh.world.kv_network.fails_pulls = fails
            worker = mesh.workers[worker_id]
            await worker.worker.engine.reset_cache()
            steps = worker.engine.load().step
            await WarmUp(
                worker=worker.worker, checks=worker.checks, own_handoff=worker.own_handoff, clock=mesh.world.clock
            ).start()
            assert worker.engine.load().step > steps
            await until(lambda engine=worker.engine: not engine.load().kv_blocks_used, 5.0)
            assert not worker.worker.statistics().leases
            # The check by a peer leaves its prompt's block in the prefill worker's cache. All checks use the same block.
            assert len(worker.engine.scheduler.pool.cached_names()) <= 2
            if worker_id != PREFILL:
                assert bool(worker.engine.load().failing_kv_paths) is fails

    run_scenario(MeshShape(prefill=1, decode=1), scenario)


def test_a_failed_warm_up_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The warm-up's request fails because the worker drains. The worker serves nevertheless, and the log does not say that it is warm."""

    async def scenario(mesh: ScriptedMesh) -> None:
        worker = decode_of(mesh)
        part = WarmUp(
            worker=worker.worker, checks=worker.checks, own_handoff=worker.own_handoff, clock=mesh.world.clock
        )
        for is_draining, expected in ((False, "worker_warmed_up"), (True, "warm_up_failed")):
            worker.worker.set_draining(is_draining)
            caplog.clear()
            await part.start()
            assert [each.message for each in caplog.records if "warm" in each.message] == [expected]

    with caplog.at_level(logging.INFO):
        run_scenario(MeshShape(prefill=1, decode=1), scenario)


def test_a_prefill_worker_is_checked_before_it_registers(caplog: pytest.LogCaptureFixture) -> None:
    """During the warm-up a decode worker pulls from the new prefill worker. The log names the failure and the decode worker. A decode worker
    that does not answer delays the start by a few seconds only."""

    async def scenario(mesh: ScriptedMesh) -> None:
        prefill, decode = mesh.workers[PREFILL], decode_of(mesh)

        async def warm_up() -> list[tuple[str, str | None]]:
            caplog.clear()
            await WarmUp(
                worker=prefill.worker, checks=prefill.checks, own_handoff=prefill.own_handoff, clock=mesh.world.clock
            ).start()
            found = [(each.message, each.__dict__["data"]) for each in caplog.records if "data" in each.__dict__]
            return [
                (message, data.get("reason")) for message, data in found if data.get("decode_worker_id") == "decode-0"
            ]

        await until(decode.engine.kv_paths.paths, 5.0)
        before = decode.engine.kv_paths.paths()[0].pulls_total
        assert await warm_up() == [("kv_path_checked", None)]
        assert decode.engine.kv_paths.paths()[0].pulls_total == before + 1
        mesh.world.kv_network.fails_pulls = True
        assert await warm_up() == [("kv_path_check_failed", "unreachable")]
        assert decode.worker.engine.load().failing_kv_paths == [FailingKvPath(worker_id=PREFILL, reason="unreachable")]
        mesh.partition("decode-0")
        began_s = mesh.world.clock.now()
        assert [message for message, _ in await warm_up()] == ["kv_path_not_checked"]
        assert mesh.world.clock.now() - began_s < 12.0

    with caplog.at_level(logging.INFO):
        run_scenario(MeshShape(prefill=1, decode=1), scenario)
