"""Tests of the text that `kvmesh explain` prints, and of its command line."""

from dataclasses import replace

import pytest

from kvmesh.cli.explain import main, render
from kvmesh.cli.status import worker_row
from kvmesh.core import (
    Candidate,
    Coefficient,
    EarlierPlacement,
    Explanation,
    Handoff,
    KvTier,
    Placement,
    Report,
    ReportKind,
    Role,
    WorkerRef,
    WorkerView,
)
from kvmesh.errors import LostError, UnavailableError
from kvmesh.rpc.codec.router import (
    from_explanation,
    from_worker_view,
    to_explanation,
    to_worker_view,
)
from kvmesh.rpc.router.explanations import join_explanations, request_id_in


def worker(name: str, rank: int | None = None) -> WorkerRef:
    return WorkerRef(worker_id=name, address=f"{name}:1", epoch=1, data_parallel_rank=rank)


def candidate(prefill: str, decode: str, cost: float) -> Candidate:
    return Candidate(
        prefill=worker(prefill), decode=worker(decode), cost=cost, terms=(("queue", 0.001), ("prefill", cost - 0.001))
    )


EXPLANATION = Explanation(
    request_id="abc",
    policy="kv",
    decided_at_s=0.5,
    ask_id=3,
    candidates=(
        candidate("p1", "d1", 0.0123),
        candidate("p2", "d1", 0.02),
        Candidate(prefill=None, decode=worker("d2", 1), removed_by="wedged"),
    ),
    placement=Placement(
        reservation_id="r",
        prefill=worker("p1"),
        decode=worker("d1"),
        handoff=Handoff.SEQUENTIAL,
        cached_tokens=512,
        expected_ttft_s=0.01,
        reasons=("kv_overlap",),
        queued_s=0.5,
    ),
    reports=(
        Report(kind=ReportKind.PREFILLED, elapsed_s=0.01, cached_tokens=496),
        Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.015),
        Report(kind=ReportKind.FAILED, elapsed_s=2.0, error=LostError("gone"), failed_worker_id="d1"),
    ),
    margin=0.0077,
    observed_ttft_s=0.515,
    queued_s=0.5,
    cost_unit="s",
)


def test_the_text_lists_decision_candidates_and_reports():
    """`kvmesh explain` prints the decision, the expected and the observed time to first token, the table with the chosen pair marked, and the
    reports.
    """
    assert render(EXPLANATION, "router-1", 20) == (
        "request   abc\n"
        "decided   1970-01-01 00:00:00.500+00:00 by router-1, policy kv\n"
        "placed    prefill p1, decode d1 (kv_overlap)\n"
        "cached    512 prompt tokens expected, 496 found\n"
        "ttft      10.0 ms expected, 515.0 ms observed, +50%, 500.0 ms of it in the queue\n"
        "margin    7.7 ms to the second best\n"
        "\n"
        "   PREFILL  DECODE  COST     QUEUE   PREFILL  REMOVED BY\n"
        "*  p1       d1      12.3 ms  1.0 ms  11.3 ms\n"
        "   p2       d1      20.0 ms  1.0 ms  19.0 ms\n"
        "   -        d2/1    -        -       -        wedged\n"
        "\n"
        "then: prefilled after 10.0 ms; first_token after 15.0 ms; failed after 2000.0 ms (worker_lost at d1)"
    )


def test_each_placement_of_a_request_is_shown():
    """Earlier placements have a line each, including those of other routers. The text says after which token the newest one continues."""
    failed = EarlierPlacement(
        attempt=0,
        decided_at_s=0.1,
        placement=EXPLANATION.placement,
        reports=EXPLANATION.reports,
        prompt_tokens=600,
    )
    refused = Explanation(
        request_id="abc", policy="kv", decided_at_s=0.2, attempt=1, error=UnavailableError("x", reason="no_worker"),
        earlier=(failed,), prompt_tokens=640,
    )  # fmt: skip
    newest = replace(EXPLANATION, attempt=2, prompt_tokens=640, reports=())
    joined, router_id = join_explanations([(refused, "router-0"), (newest, "router-1")])
    assert router_id == "router-1"
    assert render(joined, router_id, 20).splitlines()[:4] == [
        "request   abc",
        "earlier   attempt 0: p1 and d1, prefilled after 10.0 ms; first_token after 15.0 ms; failed after 2000.0 ms (worker_lost at d1)",
        "earlier   attempt 1: no_worker",
        "attempt   2, continues after 40 tokens of the answer",
    ]


def test_a_refusal_by_a_policy_that_costs_in_requests():
    """A refusal shows its reason instead of a placement. Costs have the unit of the policy."""
    refused = Explanation(
        request_id="abc",
        policy="least_loaded",
        decided_at_s=0.0,
        error=UnavailableError("nobody", reason="no_worker"),
        candidates=(Candidate(prefill=None, decode=worker("d2"), removed_by="draining"),),
        margin=2.0,
        cost_unit="requests",
    )
    text = render(refused, "router-1", 20)
    assert "refused   no_worker: nobody" in text
    assert "2 requests to the second best" in text
    assert "draining" in text


def test_a_truncated_table_includes_the_chosen_candidate():
    """The chosen candidate is shown even if it is not among the best, because a policy may choose at random."""
    many = tuple(candidate(f"p{i}", "d1", 0.001 * i) for i in range(2, 40))
    chosen = candidate("p1", "d1", 1.0)
    text = render(
        Explanation(
            request_id="abc",
            policy="kv",
            decided_at_s=0.0,
            candidates=(*many, chosen, Candidate(prefill=worker("p99"), decode=None, removed_by="silent")),
            placement=EXPLANATION.placement,
        ),
        "router-1",
        5,
    )
    assert "*  p1 " in text
    assert "silent" in text
    assert "... and 35 more" in text
    assert len(text.splitlines()) == 5 + 1 + 1 + 5 + 1


def test_explanations_survive_encoding_and_decoding():
    """Optional fields keep the difference between absent and zero."""
    decoded = from_explanation(to_explanation(EXPLANATION))
    assert (decoded.margin, decoded.observed_ttft_s, decoded.queued_s, decoded.cost_unit) == (0.0077, 0.515, 0.5, "s")
    bare = from_explanation(to_explanation(Explanation(request_id="a", policy="kv", decided_at_s=0.0)))
    assert (bare.margin, bare.observed_ttft_s, bare.queued_s, bare.cost_unit) == (None, None, None, "")
    zero = from_explanation(to_explanation(Explanation(request_id="a", policy="kv", decided_at_s=0.0, margin=0.0)))
    assert zero.margin == 0.0


@pytest.mark.parametrize("breaker", ["", "closed", "open", "half_open"])
def test_worker_views_survive_encoding_and_decoding(breaker):
    """A worker view keeps the coefficients with their source, the breaker's state, and the blocks of each tier."""
    view = WorkerView(
        worker=worker("d1"),
        role=Role.DECODE,
        model="demo",
        trust="exact",
        trust_reason="hash_mismatch",
        index_blocks=7,
        breaker=breaker,
        coefficients=(Coefficient(name="prefill_s_per_token", value=0.001, source="learned", observations=9),),
        blocks_by_tier={KvTier.DEVICE: 7, KvTier.HOST: 3},
    )
    decoded = from_worker_view(to_worker_view(view))
    assert decoded.coefficients == view.coefficients
    assert (decoded.breaker, decoded.blocks_by_tier) == (breaker, view.blocks_by_tier)
    assert worker_row(decoded)[6:] == ("7, host 3", "exact (hash_mismatch)", "0", breaker or "-", "ok")


def test_bad_command_lines_exit_with_status_2(capsys):
    """No id, two ids and an unknown flag are errors. The message for a missing id names the header that has it."""
    assert main([]) == 2
    assert (
        "no request is named. Usage: kvmesh explain ID [--mesh NAME]. ID is in the header x-request-id"
        in capsys.readouterr().err
    )
    assert main(["--mesh", "blue"]) == 2
    assert "no request is named" in capsys.readouterr().err
    assert main(["abc", "def"]) == 2
    assert "2 ids are given: abc def" in capsys.readouterr().err
    assert main(["abc", "--nonsense", "1"]) == 2
    assert "--nonsense is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--mesh", "blue", "abc"], ["abc", "--mesh", "blue"], ["--mesh=blue", "abc"]])
def test_the_id_may_be_before_or_after_the_flags(words, capsys, monkeypatch, tmp_path):
    """The id may precede or follow the flags. The only error of these commands is that no mesh runs."""
    monkeypatch.setenv("KVMESH_STATE", str(tmp_path / "none.json"))
    assert main(words) == 1
    assert "no mesh of yours runs here" in capsys.readouterr().err


@pytest.mark.parametrize("answer_id", ["abc", "chatcmpl-abc", "cmpl-abc", "resp_abc", "msg_abc"])
def test_response_ids_of_every_api_are_accepted(answer_id):
    """Accepts the ids that OpenAI's and Anthropic's clients show."""
    assert request_id_in(answer_id) == "abc"
