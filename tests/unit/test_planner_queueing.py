"""Waiting times compared with published values and exact special cases."""

import math

import pytest

from services.planner.sizing.queueing import batching_factor, erlang_c, mean_wait_s, normal_below, wait_within


@pytest.mark.parametrize(
    ("servers", "offered", "waits"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (5, 4.0, 0.5541), (10, 8.0, 0.4092)]
)
def test_erlang_c_matches_published_tables(servers: int, offered: float, waits: float):
    """One server waits with probability rho. The other values are from tables of Erlang C."""
    assert erlang_c(servers, offered) == pytest.approx(waits, abs=5e-5)


def test_erlang_c_of_an_overloaded_pool_is_one():
    """All requests wait in an overloaded pool, and near the limit the probability stays between 0 and 1."""
    assert erlang_c(3, 3.0) == 1.0
    assert erlang_c(3, 7.5) == 1.0
    assert 0.99 < erlang_c(3, 2.999999) <= 1.0
    assert erlang_c(100_000, 10.0) == 0.0


def test_one_server_matches_pollaczek_khinchine():
    """The mean wait is rho E[S] (1 + Cs^2) / (2 (1 - rho)), which is exact for M/G/1."""
    for cv2 in (0.0, 1.0, 3.5):
        expected = 0.8 * 0.5 * (1 + cv2) / (2 * (1 - 0.8))
        assert mean_wait_s(servers=1, rate=1.6, service_s=0.5, service_cv2=cv2) == pytest.approx(expected)


def test_m_m_k_is_exact():
    """The mean wait of M/M/k is C(k, a) / (k mu - lambda), and infinite at full load."""
    assert mean_wait_s(servers=5, rate=4.0, service_s=1.0, service_cv2=1.0) == pytest.approx(0.5541, abs=5e-5)
    assert math.isinf(mean_wait_s(servers=5, rate=5.0, service_s=1.0, service_cv2=1.0))


def test_the_tail_has_the_mean_of_the_wait():
    """The integral of P(wait > t) equals the mean wait."""
    step = 0.001
    tail = sum((1 - wait_within(i * step, waiting=0.4, mean_s=0.3)) * step for i in range(10_000))
    assert tail == pytest.approx(0.3, rel=0.01)
    assert wait_within(-0.1, waiting=0.4, mean_s=0.3) == 0.0
    assert wait_within(1.0, waiting=0.0, mean_s=0.0) == 1.0
    assert wait_within(1.0, waiting=1.0, mean_s=math.inf) == 0.0


def test_batching_factor():
    """The factor is 1 if each prompt fills a step, and at most 1.5."""
    assert batching_factor(0.9, 1.0) == 1.0
    assert batching_factor(1.0, 8.0) == pytest.approx(1.5)


def test_normal_distribution_function():
    """`normal_below` matches known values, and is defined for a variance of 0."""
    assert normal_below(3.0, mean=3.0, variance=4.0) == pytest.approx(0.5)
    assert normal_below(7.0, mean=3.0, variance=4.0) == pytest.approx(0.97725, abs=1e-5)
    assert (normal_below(3.0, mean=3.0, variance=0.0), normal_below(2.9, mean=3.0, variance=0.0)) == (1.0, 0.0)
