"""Settings of decisions."""

from dataclasses import dataclass, field

from kvmesh.errors import InvalidRequestError
from kvmesh.settings import setting
from services.planner.decide.thresholds import ThresholdSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideSettings:
    """How the planner sizes pools and when it changes them."""

    sizing: str = setting(
        "targets",
        "`targets`: pools are sized so that latency targets are kept. `thresholds`: by the backlog and the use of KV alone, without targets.",
        choices=("targets", "thresholds"),
    )
    thresholds: ThresholdSettings = field(default_factory=ThresholdSettings)
    predictor: str = setting(
        "",
        "Predictor of the load. Empty: the best in back-tests; `seasonal` needs `season_s`. `arima` and `prophet` need their packages"
        " (`pip install 'kvmesh[arima]'`), and much more time.",
        choices=("", "constant", "window", "kalman", "seasonal", "arima", "prophet"),
    )
    interval_s: float = setting(10.0, "Interval of the history of the load.", min=1)
    season_s: float = setting(0.0, "Period after which the load repeats, such as 86400. 0: none.", min=0)
    history_max: int = setting(8640, "Intervals of history that are kept.", min=10)
    headroom_quantile: float = setting(
        0.7,
        "Share of past predictions that the headroom on top would have covered. More: fewer missed targets, more workers.",
        min=0.0,
        max=1.0,
    )
    start_s: float = setting(60.0, "Time from the start of a worker until it serves requests.", min=0)
    flip_s: float = setting(5.0, "Time in which a worker changes its role, its drain included.", min=0)
    calm_s: float = setting(
        60.0,
        "A pool shrinks to the largest size that was needed within this time. About `start_s`: a spare worker then costs at most as much as"
        " starting one.",
        min=0,
    )
    flips: bool = setting(True, "Workers change between the pools.")
    deflects: bool = setting(
        True, "Routers are told to let decode workers compute short prompts when prefill is short."
    )
    deflect_tokens_max: int = setting(4096, "Longest prompt that decode workers compute.", min=1)
    hold_s: float = setting(600.0, "Time for which the planner leaves a pool alone after a change by hand.", min=0)
    workers_max: int = setting(64, "Largest pool of a model whose targets name no maximum.", min=1, max=100_000)

    def __post_init__(self) -> None:
        if self.predictor == "seasonal" and not self.season_s:
            raise InvalidRequestError("the predictor seasonal needs season_s", field="predictor")
