"""Checks whether a leg fits the handoff of its engine."""

from kvmesh.core import LegTask, Role
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.rendezvous.wire import FAKE_HOST
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import InvalidRequestError, UnsupportedError

TASKS = {Role.PREFILL: LegTask.PREFILL, Role.DECODE: LegTask.GENERATE}


def check_rendezvous(request: EngineRequest, settings: SimulatedSettings, *, role: Role, is_rendezvous: bool) -> None:
    """Raises InvalidRequestError or UnsupportedError. `is_rendezvous`: the engine serves only legs of a rendezvous."""
    rendezvous = request.rendezvous
    if not is_rendezvous:
        if rendezvous is not None:
            raise UnsupportedError("this engine does no rendezvous handoff", field="rendezvous")
        return
    if request.task is not TASKS[role]:
        raise UnsupportedError(f"a {role.value} worker of a rendezvous does no {request.task.value} legs", field="task")
    if rendezvous is None:
        raise InvalidRequestError(
            "this worker serves requests in pairs only: the leg needs a rendezvous", field="rendezvous"
        )
    if request.handle is not None:
        raise InvalidRequestError("a leg has a handle or a rendezvous, not both", field="handle")
    if settings.kv_transport == "fake" and rendezvous.host != FAKE_HOST:
        raise UnsupportedError(
            f"this worker moves no KV (kv_transport fake), so it only serves warm-up legs, whose host is {FAKE_HOST}",
            reason="fake_transfer",
            field="rendezvous.host",
        )
