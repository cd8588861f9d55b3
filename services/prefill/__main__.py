"""`python -m services.prefill`: one worker that starts as a prefill worker."""

from kvmesh.core import Role
from kvmesh.lifecycle import end_process, run_process
from kvmesh.settings import load_or_exit
from kvmesh.worker.host import serve_worker
from kvmesh.worker.settings import HostSettings


def main() -> int:
    """Runs until SIGTERM or SIGINT."""
    settings = load_or_exit(HostSettings, program="python -m services.prefill", description=__doc__ or "")
    return run_process(lambda: serve_worker(settings, Role.PREFILL))


if __name__ == "__main__":
    end_process(main())
