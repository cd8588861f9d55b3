"""Fencing: a planner that has lost the lead must not act any more, whatever it still believes."""

from kvmesh.errors import UnsupportedError


class Fence:
    """Remembers the newest leader's token. See Kleppmann, "How to do distributed locking" (2016), on fencing tokens."""

    def __init__(self) -> None:
        self.newest_token = 0

    def check(self, token: int) -> None:
        """Raises UnsupportedError for a token older than the newest one. 0 is not a planner's token and always passes."""
        if not token:
            return
        if token < self.newest_token:
            raise UnsupportedError(
                "another planner leads now: the fencing token is old", reason="not_leader", field="fencing_token"
            )
        self.newest_token = token
