"""The index ends equal to the union of the workers' caches: 300 seeds of faults, and it is a test that can fail."""

import pytest

from services.router.index.kv_feed import KvFeed
from tests.simulation import index


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(1, 301, 100))
def test_the_index_is_exact_when_the_faults_have_stopped(first: int) -> None:
    """Lost, doubled, swapped and late batches, broken streams, routers and workers that begin anew: exact every time."""
    index.run_many(first, 100)


def test_a_failure_tells_how_to_play_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that takes a batch twice for two is caught within a few seeds, and the command is part of the failure."""
    apply = KvFeed.apply

    def careless(self: KvFeed, step: object) -> bool:
        apply(self, step)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(KvFeed, "apply", careless)
    with pytest.raises(AssertionError, match=r"replay: python -m tests.simulation.index --seed \d+"):
        index.run_many(1, 20)
