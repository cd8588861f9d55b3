"""`python -m services.decode`: one decode worker."""

import sys

from kvmesh.api.decode.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.core import Role
from kvmesh.lifecycle import run_process
from kvmesh.settings import load_or_exit
from kvmesh.worker.host import serve_worker
from services.decode.admit import DecodeAdmission
from services.decode.settings import DecodeSettings

SERVICE = "kvmesh.decode.v1.DecodeService"


def main() -> int:
    """Runs until SIGTERM or SIGINT."""
    settings = load_or_exit(DecodeSettings, program="python -m services.decode", description=__doc__ or "")
    admission = DecodeAdmission(waiting_requests_max=settings.waiting_requests_max)

    add_servicer = add_DecodeServiceServicer_to_server
    return run_process(lambda: serve_worker(settings, Role.DECODE, SERVICE, add_servicer, admission))


if __name__ == "__main__":
    sys.exit(main())
