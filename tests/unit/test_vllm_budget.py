"""The learned token budget of vLLM's steps keeps steps within their time for engines of any speed."""

from random import Random

import pytest

from kvmesh.engines.vllm.budget import TOKENS_FIRST, TOKENS_MIN, StepBudget

BUDGET_S = 0.2
TOKENS_MAX = 2048


def run(budget: StepBudget, prompt_tokens: int, base_s: float, token_s: float, pair_s: float = 0.0) -> list[float]:
    """Returns the durations of the steps that compute a prompt on an engine of the given speed."""
    times, done = [], 0
    while done < prompt_tokens:
        take = min(budget.tokens(0), prompt_tokens - done)
        times.append(base_s + take * (token_s + pair_s * done))
        budget.observe(take, times[-1])
        done += take
    return times


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3, 2e-3])
@pytest.mark.parametrize("base_s", [0.001, 0.02, 0.1])
def test_steps_stay_within_the_budget(token_s: float, base_s: float) -> None:
    """Steps stay within the budget from the start, also with long contexts, and use it unless vLLM's own limit is smaller."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    run(budget, 2000, base_s, token_s)
    times = run(budget, 30_000, base_s, token_s, pair_s=token_s / 30_000)
    assert max(times) <= max(BUDGET_S, 2.5 * base_s)
    assert times[1] >= BUDGET_S / 2 or budget.tokens(0) == TOKENS_MAX


def test_a_large_model_advances() -> None:
    """If even the smallest chunk exceeds the budget, prompts still advance beside all decoding requests."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    run(budget, 1500, 0.01, 0.05)
    assert budget.tokens(0) == TOKENS_MIN
    assert budget.tokens(64) == 64 + TOKENS_MIN


def test_a_large_fixed_part_does_not_starve_prompts() -> None:
    """If the fixed part of a step exceeds the budget, prompts get as much time as that part."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    for _ in range(10):
        budget.observe(0, 0.5)
    times = run(budget, 30_000, 0.5, 1e-3)
    assert times[-2] == pytest.approx(1.0, rel=0.1)


def test_chunks_are_at_least_one_block() -> None:
    """If chunks must end at block boundaries, a budget below one block would compute nothing."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX, tokens_min=528)
    run(budget, 5000, 0.01, 0.05)
    assert budget.tokens(3) == 3 + 528


def test_occasional_slow_steps_change_little() -> None:
    """Two slow steps in five are attributed to the machine, not to the engine."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    run(budget, 20_000, 0.005, 1e-4)
    usual = budget.tokens(0)
    for number in range(50):
        step_s = 0.005 + 1e-4 * budget.tokens(0)
        budget.observe(budget.tokens(0), 60.0 if number % 5 in (1, 3) else step_s)
        assert budget.tokens(0) > 0.9 * usual


def test_a_machine_that_stays_slow_shrinks_the_budget() -> None:
    """The budget shrinks within a few slow steps, and recovers when steps are fast again."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    run(budget, 20_000, 0.005, 1e-4)
    usual = budget.tokens(0)
    run(budget, 6 * usual, 0.005, 1e-3)
    assert max(run(budget, 2000, 0.005, 1e-3)) <= BUDGET_S
    run(budget, 20_000, 0.005, 1e-4)
    assert budget.tokens(0) > 0.9 * usual


def test_small_steps_do_not_change_the_budget() -> None:
    """Neither decoding alone nor a short prompt shows how long a full step takes."""
    budget = StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX)
    run(budget, 20_000, 0.005, 1e-4)
    usual = budget.tokens(0)
    random = Random(3)
    for _ in range(100):
        budget.observe(0, 0.02)
        budget.observe(random.randrange(1, usual // 3), 0.12)
    assert budget.tokens(0) == usual


def test_the_first_step_is_small() -> None:
    """The speed of the engine is unknown at first."""
    assert StepBudget(budget_s=BUDGET_S, tokens_max=TOKENS_MAX).tokens(0) == TOKENS_FIRST
    assert StepBudget(budget_s=BUDGET_S, tokens_max=32).tokens(0) == 32
