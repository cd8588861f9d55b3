"""The caller of a request, identified by its API key."""

from dataclasses import dataclass, field

from kvmesh.errors import NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant. None: no limit. Of a key, `priority_max` is 0 unless the document says otherwise."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated client. `models` None: any model. `key_id`: start of the key's hash, for logs.

    `sends_compressed`: whether its request bodies may be compressed. `is_operator`: whether it may see the whole mesh on /ui.
    """

    tenant: str = ""
    key_id: str = ""
    models: frozenset[str] | None = None
    quota: Quota = field(default_factory=Quota)
    sends_compressed: bool = False
    is_operator: bool = False

    def allows(self, model: str) -> bool:
        """Returns whether the caller may use the model or adapter."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises NotFoundError for a model that the caller may not use, so that its existence is not disclosed."""
        if not self.allows(model):
            raise model_not_found(model)


def model_not_found(name: str) -> NotFoundError:
    """Returns the same error for a model that is not served and for one that the caller may not use."""
    return NotFoundError(
        f"the model {name[:128]!r} does not exist; /v1/models (gRPC: ListModels) lists those that do",
        field="model",
        reason="model_not_found",
    )


ANYBODY = Caller()
"""The caller if no keys are required."""
