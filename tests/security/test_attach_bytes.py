"""Bytes that are not a message end the peer's stream with a client error and no traceback in the log."""

import asyncio
import logging

import grpc
import grpc.aio
import pytest

from kvmesh.api.worker.v1 import legs_pb2 as pb
from tests.patience import PATIENCE_S
from tests.worker_rig import RawFrontend, running_worker

ATTACH = "/kvmesh.decode.v1.DecodeService/Attach"
GARBAGE = b"\xff\xff\xff\xff"


@pytest.mark.parametrize("comes_first", [True, False])
async def test_malformed_bytes_end_only_the_stream_that_sent_them(
    comes_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Malformed bytes end their stream with INVALID_ARGUMENT and at most one log line. Legs of other streams continue."""
    caplog.set_level(logging.INFO)
    async with running_worker("grpc") as rig, asyncio.timeout(PATIENCE_S):
        other = await RawFrontend.attach(rig.channel, "other")
        await other.submit(1, tokens=200)
        call = rig.channel.stream_stream(ATTACH)()
        if not comes_first:
            await call.write(pb.AttachRequest(hello=pb.Hello(frontend_id="f")).SerializeToString())
            assert await call.read() is not grpc.aio.EOF
        await call.write(GARBAGE)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        while 1 not in other.finishes:
            assert await other.read_one()
        assert len(other.tokens[1]) == 200
    loud = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert loud == []
    assert sum(record.message == "attach_message_invalid" for record in caplog.records) <= 1
