"""The agent's one counter of changes, Consul's index."""


class Counter:
    """Grows with every change of any kind. Begun at a time of day, it stays clear of the values of an earlier life."""

    def __init__(self, first: int = 1) -> None:
        self._value = max(1, first)

    @property
    def value(self) -> int:
        """The index of the last change."""
        return self._value

    def advance(self) -> int:
        """The index of a new change."""
        self._value += 1
        return self._value
