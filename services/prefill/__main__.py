"""`python -m services.prefill`: one prefill worker."""

import sys

from kvmesh.api.prefill.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from kvmesh.core import Role
from kvmesh.lifecycle import run_process
from kvmesh.settings import load_or_exit
from kvmesh.worker.host import serve_worker
from services.prefill.admit import PrefillAdmission
from services.prefill.settings import PrefillSettings

SERVICE = "kvmesh.prefill.v1.PrefillService"


def main() -> int:
    """Runs until SIGTERM or SIGINT."""
    settings = load_or_exit(PrefillSettings, program="python -m services.prefill", description=__doc__ or "")
    admission = PrefillAdmission(waiting_prompt_tokens_max=settings.waiting_prompt_tokens_max)

    add_servicer = add_PrefillServiceServicer_to_server
    return run_process(lambda: serve_worker(settings, Role.PREFILL, SERVICE, add_servicer, admission))


if __name__ == "__main__":
    sys.exit(main())
