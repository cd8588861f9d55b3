"""The router's index equals the union of the workers' caches after the faults of 300 seeds. A planted bug makes the test fail."""

import pytest

from services.router.index.kv_feed import KvFeed
from tests.simulation import index


@pytest.mark.parametrize("first", range(1, 301, 100))
def test_the_index_is_exact_when_the_faults_have_stopped(first: int) -> None:
    """After lost, duplicated, swapped and late batches, broken streams, and restarts of routers and workers, the index is exact."""
    index.run_many(first, 100)


def test_a_failure_names_the_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a feed accepts every batch as correct, some of the first 20 seeds fail, and the error names the command that replays the run."""
    apply = KvFeed.apply

    def accepts_everything(self: KvFeed, step: object) -> bool:
        apply(self, step)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(KvFeed, "apply", accepts_everything)
    with pytest.raises(AssertionError, match=r"replay: python -m tests.simulation.index --seed \d+"):
        index.run_many(1, 20)
