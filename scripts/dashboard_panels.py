"""The content of the Grafana dashboards of compose/. scripts/compose_files.py writes their JSON.

`$__rate_interval` is Grafana's. `or vector(0)` shows zero for a series that does not exist before its first event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `queries` maps legends to PromQL; `unit` is one of Grafana's units; `width` is in 24ths of the page."""

    title: str
    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard. `name` is the file name; Grafana's uid is the name with a prefix."""

    name: str
    title: str
    panels: Sequence[Panel]


def stat(title: str, query: str, about: str) -> Panel:
    """Returns a panel with one number."""
    return Panel(title=title, about=about, queries={"": query}, kind="stat", width=4)


def rate(counter: str, by: str = "", match: str = "") -> str:
    """Returns the rate of a counter, summed."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({counter}{match}[$__rate_interval]))"


def or_zero(query: str) -> str:
    """Returns a query that yields 0 while its series does not exist."""
    return f"{query} or vector(0)"


def quantiles(histogram: str, by: str = "model") -> dict[str, str]:
    """Returns queries for the median, the 95th and the 99th percentile of a histogram."""
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    labels = f"le, {by}" if by else "le"
    return {
        f"p{percent}{legend}": f"histogram_quantile({percent / 100}, {rate(f'{histogram}_bucket', labels)})"
        for percent in (50, 95, 99)
    }


MESH = Dashboard(
    name="mesh",
    title="kvmesh: mesh",
    panels=[
        stat("Frontends", 'count(up{service="kvmesh-frontend"} == 1)', "Frontends that Prometheus reaches."),
        stat("Routers", 'count(up{service="kvmesh-router"} == 1)', "Routers that Prometheus reaches."),
        stat("Prefill workers", "max(kvmesh_router_prefill_workers)", "Workers that routers send prompts to."),
        stat("Decode workers", "max(kvmesh_router_decode_workers)", "Workers that routers send answers to."),
        stat("Services down", or_zero('count(up{job="kvmesh"} == 0)'), "Registered services that cannot be scraped."),
        stat("Requests in flight", "sum(kvmesh_frontend_inflight_requests)", "On all frontends."),
        Panel(
            title="Requests per second",
            about="Requests that ended, by model and HTTP status.",
            queries={"{{model}} {{code}}": rate("kvmesh_frontend_requests_total", "model, code")},
            unit="reqps",
        ),
        Panel(
            title="Failed requests",
            about="Share of requests that ended with a status of 500 or above.",
            queries={
                "failed": "({}) / clamp_min({}, 1e-9)".format(
                    or_zero(rate("kvmesh_frontend_requests_total", match='{code=~"5.."}')),
                    rate("kvmesh_frontend_requests_total"),
                )
            },
            unit="percentunit",
        ),
        Panel(
            title="Tokens per second",
            about="Prompt tokens of started requests, and tokens received from workers.",
            queries={
                "prompt {{model}}": rate("kvmesh_frontend_prompt_tokens_total", "model"),
                "output {{model}}": rate("kvmesh_frontend_output_tokens_total", "model"),
            },
        ),
        Panel(
            title="Time to the first token",
            about="As frontends measure it.",
            queries=quantiles("kvmesh_frontend_ttft_seconds"),
            unit="s",
        ),
        Panel(
            title="Time between tokens",
            about="As frontends measure it.",
            queries=quantiles("kvmesh_frontend_itl_seconds"),
            unit="s",
        ),
        Panel(
            title="Requests that moved",
            about="Answers that continued on another worker, or began again, after a worker was lost.",
            queries={
                "continued": or_zero(rate("kvmesh_frontend_continued_requests_total")),
                "restarted": or_zero(rate("kvmesh_frontend_restarted_requests_total")),
            },
            unit="reqps",
        ),
        Panel(
            title="Prompt lengths",
            about="Tokens of the prompts of started requests.",
            queries=quantiles("kvmesh_frontend_prompt_length_tokens"),
        ),
        Panel(
            title="Placed without a router",
            about="Requests that frontends placed themselves because no router answered.",
            queries={"local": rate("kvmesh_frontend_local_placements_total")},
            unit="reqps",
        ),
        Panel(
            title="Scraped services",
            about="1: Prometheus reaches the service.",
            queries={"{{instance}}": 'up{job="kvmesh"}'},
        ),
    ],
)

ROUTER = Dashboard(
    name="router",
    title="kvmesh: router decisions",
    panels=[
        Panel(
            title="Placements by reason",
            about="Why a request went where it went.",
            queries={"{{reason}}": rate("kvmesh_router_placed_requests_total", "reason")},
            unit="reqps",
        ),
        Panel(
            title="Cached share of prompts",
            about="Prompt tokens that the router expects in the cache of the chosen worker, over all prompt tokens.",
            queries={
                "cached": f"{rate('kvmesh_router_cached_prompt_tokens_total')}"
                f" / clamp_min({rate('kvmesh_router_prompt_tokens_total')}, 1)"
            },
            unit="percentunit",
        ),
        Panel(
            title="Time of a decision",
            about="Without the queue.",
            queries=quantiles("kvmesh_router_decision_seconds", by=""),
            unit="s",
        ),
        Panel(
            title="Queued requests",
            about="Requests that wait for capacity, by priority.",
            queries={"{{priority}}": "sum by (priority) (kvmesh_router_queue_requests)"},
        ),
        Panel(
            title="Queued tokens",
            about="Prompt tokens of queued requests that no worker has cached.",
            queries={"{{priority}}": "sum by (priority) (kvmesh_router_queue_tokens)"},
        ),
        Panel(
            title="Time in the queue",
            about="95th percentile of requests that were queued.",
            queries={
                "p95": or_zero(f"histogram_quantile(0.95, {rate('kvmesh_router_queue_wait_seconds_bucket', 'le')})")
            },
            unit="s",
        ),
        Panel(
            title="Refusals",
            about="Requests that were refused, by reason.",
            queries={"{{reason}}": or_zero(rate("kvmesh_router_refused_requests_total", "reason"))},
            unit="reqps",
        ),
        Panel(
            title="Prediction error",
            about="(observed - expected) / expected: median by phase and worker. Near 0 the cost model fits.",
            queries={
                "{{phase}} {{worker}}": "histogram_quantile(0.5, {})".format(
                    rate("kvmesh_router_prediction_error_ratio_bucket", "le, phase, worker")
                )
            },
            unit="percentunit",
        ),
        Panel(
            title="Placed requests that run",
            about="Reservations of each router.",
            queries={"{{instance}}": "kvmesh_router_reservations"},
        ),
        Panel(
            title="KV index",
            about="Distinct blocks of the index, and how well routers know what workers have cached.",
            queries={
                "blocks {{instance}}": "kvmesh_router_index_blocks",
                "exact feeds {{instance}}": "kvmesh_router_exact_feeds",
                "approximate feeds {{instance}}": "kvmesh_router_approximate_feeds",
            },
        ),
        Panel(
            title="Workers in trouble",
            about="Breakers that are open, workers that make no step, pairs whose handoffs are slow or fail.",
            queries={
                "open breakers": "max(kvmesh_router_open_breakers)",
                "wedged workers": "max(kvmesh_router_wedged_workers)",
                "slow pairs": "max(kvmesh_router_slow_pairs)",
                "failing pairs": "max(kvmesh_router_failing_kv_pairs)",
                "lost paths": "max(kvmesh_router_open_paths)",
            },
        ),
        Panel(
            title="Other routers",
            about="Streams to other routers, and their reservations that are counted.",
            queries={
                "peers {{instance}}": "kvmesh_router_peers",
                "reservations {{instance}}": "kvmesh_router_peer_reservations",
            },
        ),
    ],
)

WORKERS = Dashboard(
    name="workers",
    title="kvmesh: workers",
    panels=[
        Panel(
            title="Running requests",
            about="Requests in each worker's batch.",
            queries={"{{instance}}": "kvmesh_worker_running_requests"},
        ),
        Panel(
            title="Waiting requests",
            about="Requests that wait for their first step.",
            queries={"{{instance}}": "kvmesh_worker_waiting_requests"},
        ),
        Panel(
            title="KV use",
            about="KV blocks in use over all blocks.",
            queries={"{{instance}}": "kvmesh_worker_kv_blocks_used / kvmesh_worker_kv_blocks_total"},
            unit="percentunit",
        ),
        Panel(
            title="Prompt tokens computed per second",
            about="By worker.",
            queries={"{{instance}}": rate("kvmesh_worker_prompt_tokens_total", "instance")},
        ),
        Panel(
            title="Output tokens per second",
            about="By worker.",
            queries={"{{instance}}": rate("kvmesh_worker_output_tokens_total", "instance")},
        ),
        Panel(
            title="Prompt tokens from the cache per second",
            about="Prompt tokens that a worker had cached.",
            queries={"{{instance}}": rate("kvmesh_worker_cached_tokens_total", "instance")},
        ),
        Panel(
            title="KV from other workers",
            about="Prompt tokens per second whose KV a decode worker pulled from a prefill worker.",
            queries={"{{instance}}": rate("kvmesh_worker_transferred_tokens_total", "instance", '{role="decode"}')},
        ),
        Panel(
            title="Handoffs that failed",
            about="Failed pulls per second, and prompt tokens that were computed again because of them.",
            queries={
                "failed {{instance}}": rate("kvmesh_worker_failed_handoffs_total", "instance"),
                "recomputed tokens {{instance}}": rate("kvmesh_worker_recomputed_tokens_total", "instance"),
            },
        ),
        Panel(
            title="Leased KV blocks",
            about="KV blocks held for handles that nobody has pulled yet. Returns to 0 without load.",
            queries={"{{instance}}": "kvmesh_worker_kv_blocks_leased"},
        ),
        Panel(
            title="Preempted requests per second",
            about="Requests taken off the batch for want of KV blocks.",
            queries={"{{instance}}": rate("kvmesh_worker_preempted_requests_total", "instance")},
        ),
        Panel(
            title="Failing KV paths",
            about="Prefill workers whose KV a worker cannot pull.",
            queries={"{{instance}}": "kvmesh_worker_failing_kv_paths"},
        ),
        Panel(
            title="Waiting prompt tokens",
            about="Prompt tokens accepted but not computed yet.",
            queries={"{{instance}}": "kvmesh_worker_waiting_prompt_tokens"},
        ),
    ],
)

PLANNER = Dashboard(
    name="planner",
    title="kvmesh: planner",
    panels=[
        Panel(
            title="Prefill workers: plan and reality",
            about="Workers that the newest decision wants, and workers that get requests.",
            queries={
                "planned {{model}}": 'kvmesh_planner_planned_workers{role="prefill"}',
                "present": "max(kvmesh_router_prefill_workers)",
            },
            width=12,
        ),
        Panel(
            title="Decode workers: plan and reality",
            about="Workers that the newest decision wants, and workers that get requests.",
            queries={
                "planned {{model}}": 'kvmesh_planner_planned_workers{role="decode"}',
                "present": "max(kvmesh_router_decode_workers)",
            },
            width=12,
        ),
        Panel(
            title="Load: predicted and observed",
            about="Requests per second.",
            queries={
                "predicted {{model}}": "kvmesh_planner_predicted_rate",
                "observed {{model}}": rate("kvmesh_frontend_requests_total", "model"),
            },
            unit="reqps",
        ),
        Panel(
            title="Error of the predictor",
            about="Mean error in back-tests over the mean rate; 0 until there is enough history.",
            queries={"{{model}}": or_zero("kvmesh_planner_predictor_error_ratio")},
            unit="percentunit",
        ),
        Panel(
            title="Correction of latencies",
            about="Observed over predicted latency. 1: the worker's profile fits.",
            queries={"{{latency}} {{model}}": "kvmesh_planner_correction_ratio"},
        ),
        Panel(
            title="Decisions",
            about="Decisions that differ from the one before, by action and outcome.",
            queries={"{{action}} {{outcome}}": "sum by (action, outcome) (kvmesh_planner_decisions_total)"},
        ),
        Panel(
            title="Problems",
            about="Problems of the newest observation; the planner's log names them.",
            queries={"{{instance}}": "kvmesh_planner_problems"},
        ),
        Panel(
            title="Observations per second",
            about="0: the planner does not observe.",
            queries={"{{instance}}": rate("kvmesh_planner_observations_total", "instance")},
        ),
    ],
)

DASHBOARDS = (MESH, ROUTER, WORKERS, PLANNER)
