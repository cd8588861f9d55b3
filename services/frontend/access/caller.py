"""The caller of the request in hand, known from its API key.

It travels in a context variable: HTTP handlers and gRPC servicers run in the task in which the key was checked, and what they
start inherits it. Work that outlives its request (batches) keeps the tenant and sets the caller itself.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field

from kvmesh.errors import NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `models` None: any model. `key_id` is the start of the key's hash, for logs."""

    tenant: str = ""
    key_id: str = ""
    models: frozenset[str] | None = None
    quota: Quota = field(default_factory=Quota)

    def allows(self, model: str) -> bool:
        """Whether the caller may use a model, or adapter, of this name."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """A model that the caller may not use does not exist for it."""
        if not self.allows(model):
            raise NotFoundError(f"model {model!r} does not exist", reason="model_not_found", field="model")


ANYBODY = Caller()
"""The caller where no keys are asked for."""

current_caller: ContextVar[Caller] = ContextVar("kvmesh_caller", default=ANYBODY)
