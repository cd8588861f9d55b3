"""Makes up documents that match a constraint, from a seed, where a real engine masks its logits."""

from kvmesh.errors import InvalidRequestError, UnsupportedError

FIELD = "generation.sampling.constraint"


def refused(what: str, *, is_wrong: bool = False) -> InvalidRequestError | UnsupportedError:
    """Returns the error for a constraint that is not supported; `is_wrong`: that no document could match."""
    if is_wrong:
        return InvalidRequestError(f"the constraint has {what}", field=FIELD)
    return UnsupportedError(f"the simulated engine cannot generate documents for {what}", field=FIELD)
