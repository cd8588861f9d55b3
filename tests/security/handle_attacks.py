"""Attacks with KV handles on a mesh of one prefill and one decode worker. No attack may read KV."""

from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvmesh.api.decode.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.api.worker.v1 import legs_pb2
from kvmesh.core import Generation, KvHandle, KvReader, Leg, LegFinish, LegTask, SamplingParams
from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.errors import MeshError
from kvmesh.rpc.codec.legs import from_finish, to_leg
from kvmesh.rpc.prefill_client import GrpcPrefillClient
from kvmesh.rpc.status import from_rpc_error
from tests.integration.mesh import RunningMesh, metrics_text, wait_until, worker_metric
from tests.patience import PATIENCE_S


class Attacker:
    """Has an operator's certificate, with which it submits legs to workers directly. No client of the API can do this."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self._channels = mesh.target.channels()

    async def worker(self, service: str) -> Instance:
        registry = self._mesh.target.registry()
        try:
            (found,) = (await registry.instances(service)).instances
            return found
        finally:
            await registry.aclose()

    async def prefill(self, prompt: Generation, leg_id: str) -> KvHandle:
        """Returns the handle of a prompt, sealed for a leg of the mesh's decode worker."""
        reader = KvReader(worker_id=(await self.worker(DECODE)).instance_id, leg_id=leg_id)
        leg = Leg(leg_id=f"{leg_id}p", task=LegTask.PREFILL, generation=prompt, reader=reader)
        address = (await self.worker(PREFILL)).address
        return await GrpcPrefillClient(self._channels).prefill(address, leg, timeout_s=PATIENCE_S)

    async def release(self, handle: KvHandle) -> None:
        address = (await self.worker(PREFILL)).address
        await GrpcPrefillClient(self._channels).release(address, handle.handle_id, timeout_s=PATIENCE_S)

    async def decode(self, prompt: Generation, leg_id: str, handle: KvHandle) -> LegFinish:
        leg = Leg(leg_id=leg_id, task=LegTask.GENERATE, generation=prompt, handle=handle)
        stub: Any = DecodeServiceStub(self._channels.channel((await self.worker(DECODE)).address))
        try:
            async for message in stub.Generate(legs_pb2.GenerateRequest(leg=to_leg(leg)), timeout=PATIENCE_S):
                if message.HasField("finish"):
                    return from_finish(message.finish)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, where="decode") from error
        raise AssertionError("the leg's stream ended without a finish")

    async def pulled(self) -> float:
        """Returns the number of tokens whose KV the decode worker has pulled."""
        metrics_port = int((await self.worker(DECODE)).meta["metrics_port"])
        return worker_metric(await metrics_text("127.0.0.1", metrics_port), "kvmesh_worker_transferred_tokens_total")

    async def aclose(self) -> None:
        await self._channels.aclose()


async def check_stolen_handles(mesh: RunningMesh) -> None:
    """The decode worker refuses every misuse of a victim's handle before it reads a block, and still serves the victim."""
    attacker = Attacker(mesh)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    victim = Generation(model="demo", token_ids=list(range(20, 148)), cache_salt="victim", sampling=sampling)
    handle = await attacker.prefill(victim, "victim-0")
    own = await attacker.prefill(replace(victim, cache_salt="own", token_ids=list(range(40, 168))), "attack-0")
    before = await attacker.pulled()
    attacks = (
        ("another request", victim, "attack-1", handle),
        ("another tenant", replace(victim, cache_salt="own"), "victim-0", handle),
        ("another prompt", replace(victim, token_ids=list(range(21, 149))), "victim-0", handle),
        ("altered blocks", victim, "victim-0", replace(handle, payload=own.payload)),
        ("own seal", victim, "victim-0", replace(handle, seal=own.seal)),
        ("no seal", victim, "victim-0", replace(handle, seal=b"")),
        ("a poisoned cache", victim, "attack-0", own),
    )
    for name, prompt, leg_id, stolen in attacks:
        with pytest.raises(MeshError) as caught:
            await attacker.decode(prompt, leg_id, stolen)
        assert caught.value.reason == "kv_seal", name
    assert await attacker.pulled() == before
    finish = await attacker.decode(victim, "victim-0", handle)
    assert finish.error is None and not finish.was_recomputed and finish.usage.transferred_tokens > 0
    with pytest.raises(MeshError) as caught:
        await attacker.decode(victim, "victim-0", handle)
    assert caught.value.reason == "kv_seal"

    async def has_pulled() -> bool:
        return await attacker.pulled() > before

    await wait_until(has_pulled, PATIENCE_S, "the worker pulls the KV of the genuine handle")
    # A worker that stops first waits for its handles.
    await attacker.release(own)
    await attacker.aclose()
