"""See the package."""


class RequestError(RuntimeError):
    """See the stub."""
