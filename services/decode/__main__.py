"""`python -m services.decode`: one decode worker."""

import sys

import grpc.aio

from kvmesh.api.decode.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.clock import Clock
from kvmesh.core import Role
from kvmesh.lifecycle import run_process
from kvmesh.settings import load_or_exit
from kvmesh.worker.host import serve_worker
from kvmesh.worker.worker import Worker
from services.decode.admit import DecodeAdmission
from services.decode.servicer import DecodeServicer
from services.decode.settings import DecodeSettings

SERVICE = "kvmesh.decode.v1.DecodeService"


def main() -> int:
    """Runs until told to stop."""
    settings = load_or_exit(DecodeSettings, program="python -m services.decode", description=__doc__ or "")
    admission = DecodeAdmission(waiting_requests_max=settings.waiting_requests_max)

    def add_servicer(server: grpc.aio.Server, worker: Worker, clock: Clock) -> None:
        add_DecodeServiceServicer_to_server(
            DecodeServicer(worker, admission, embed_parallel_max=settings.embed_parallel_max), server
        )

    return run_process(lambda: serve_worker(settings, Role.DECODE, SERVICE, add_servicer))


if __name__ == "__main__":
    sys.exit(main())
