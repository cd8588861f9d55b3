"""How a constraint is refused."""

from kvmesh.errors import InvalidRequestError, UnsupportedError

FIELD = "generation.sampling.constraint"


def refused(what: str, *, is_wrong: bool = False) -> InvalidRequestError | UnsupportedError:
    """The error for a constraint that no document is made up for; `is_wrong`: that nothing could match."""
    if is_wrong:
        return InvalidRequestError(f"the constraint has {what}", field=FIELD)
    return UnsupportedError(f"the simulated engine makes up no document for {what}", field=FIELD)
