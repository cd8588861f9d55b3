"""Decides for one model. Pure: observations and times are arguments.

1. The plan does not change while the observation is incomplete, after a change by hand, or without targets.
2. The sizer computes the pools for the largest load that is expected until new workers would be ready. A pool grows immediately, and
   shrinks to the largest size that was needed within `calm_s`.
3. If the present pools keep the targets, now and later, the only changes are those that save cost.
4. Otherwise, of the changes that raise the goodput, the fastest is made; of equally fast ones the one with the highest goodput. The next
   tick adds what is still missing: first a deflection, then a flip, then new workers.
5. A surge within one tick may be chance. The planner only deflects then, because a deflection costs nothing and ends automatically.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvmesh.core.planning import (
    Alternative,
    Decision,
    DecisionAction,
    DecisionInputs,
    ObservationState,
    Shape,
    Targets,
)
from services.planner.decide.alternatives import TOLERANCE, Evaluator, Situation, best_first, fastest_first
from services.planner.decide.backlog import catch_up_rate, harmless_tokens
from services.planner.decide.correction import Correction
from services.planner.decide.history import LoadHistory, coming_demand
from services.planner.decide.settings import DecideSettings
from services.planner.decide.stabiliser import Excursions, Stabiliser
from services.planner.decide.thresholds import Thresholds
from services.planner.observation import ModelObservation
from services.planner.sizing.bursts import BurstHistory, Bursts
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer, Sizing, cost_of
from services.planner.sizing.speed import Speed

CATCH_UP_S = 15.0
"""New workers remove a backlog within this time once they are ready."""
BACKLOG_S = 10.0
"""A backlog counts as load that must be served within this time."""
GAIN_MIN = 0.01
"""Part of the load by which a change must raise the goodput; less is within the error of the model."""
RETUNING = 5.0
"""Factor of GAIN_MIN for another bound of deflection."""
SHRINK_MARGIN = 0.1
"""Additional part of the load that a smaller pool must serve within the targets, so that the pool does not grow again immediately."""
FLIP_DWELL_S = 60.0
"""Time between two flips; twice that before a flip back. Observed latencies follow a flip within the window of a minute."""
DEFLECT_CALM_S = 20.0
"""Time without a shortage before a deflection ends."""
DEFLECT_DWELL_S = 5.0
"""Time between two changes of the bound of deflection: routers place with the new one before the next is chosen."""
ACTION_SETTLES_S = 30.0
"""For this time after a change by the planner, a size that differs from the wanted one does not count as a change by hand."""
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionChoice:
    """An action, its reason, and the alternatives, the chosen one first."""

    action: DecisionAction
    reason: str
    detail: str = ""
    alternatives: Sequence[Alternative] = ()


class ModelPlanner:
    """The state of one model. `tick` proposes; `accept` records that a proposal was carried out."""

    def __init__(self, model: str, settings: DecideSettings) -> None:
        self.model = model
        self._settings = settings
        self.history = LoadHistory(settings)
        self._stabiliser = Stabiliser(settings.calm_s)
        self._correction = Correction()
        self._thresholds: Thresholds | None = None
        if settings.sizing == "thresholds":
            self._thresholds = Thresholds(
                settings.thresholds,
                start_s=settings.start_s,
                calm_s=settings.calm_s,
                workers_max=settings.workers_max,
            )
        self._wanted: Shape | None = None
        self._is_confirmed = False
        """The connector has said which sizes are wanted."""
        self._acted_s = NEVER
        self._demand: Demand | None = None
        self._held_until_s = NEVER
        self._flipped_s = NEVER
        self._flipped_to_prefill = 0
        self._deflected_s = NEVER
        self._short_s = NEVER
        self._grown_s = NEVER
        self._rate = 0.0
        self._smoothed_s = NEVER
        self._excursions = Excursions(settings.start_s)
        self._burst_history = BurstHistory(settings.start_s)
        self._bursts: Bursts | None = None
        self._bursts_s = NEVER
        self._ticked_s: float | None = None

    def tick(
        self,
        observation: ModelObservation,
        *,
        targets: Targets | None,
        speed: Speed | None,
        wanted: Shape | None,
        now_s: float,
    ) -> tuple[ActionChoice, DecisionInputs]:
        """`wanted`: the sizes that were last set at the connector, by the planner or by others; None: it does not know them."""
        self._adopt(observation, wanted, now_s)
        assert self._wanted is not None
        inputs = DecisionInputs(state=observation.state, ready=observation.ready, wanted=self._wanted)
        if (held := self._held(observation, targets, speed, now_s=now_s)) is not None:
            return held, inputs
        if self._thresholds is not None:
            return self._choose_by_thresholds(self._thresholds, observation, targets, now_s=now_s), inputs
        assert targets is not None
        assert speed is not None
        recent = self._smoothed(observation.recent_rate, targets, now_s)
        self._demand = observation.demand or self._demand
        if self._demand is None:
            self.history.add(recent, now_s)
            return ActionChoice(
                action=DecisionAction.KEEP, reason="no_load", detail="no request was observed yet"
            ), inputs
        tokens = observation.newest_tokens
        # Tokens in units of mean prompts, since a few long prompts are a burst too.
        newest = recent if tokens is None else tokens / max(1.0, self._demand.prompt_tokens)
        settled = self._excursions.settle(recent, newest, now_s)
        self.history.add(settled, now_s)
        prediction = self.history.predict(settled)
        if self._excursions.are_usual:
            # The replay of the arrivals has the bursts already, which headroom would cover again.
            prediction = replace(prediction, upper=prediction.value)
        now = self._with_backlog(self._demand.at_rate(recent), observation, speed, targets=targets)
        bursts = self._update_bursts(observation, now_s)
        plain = Sizer(speed=speed, targets=targets, workers_max=self._settings.workers_max, bursts=bursts)
        catch_up = self._catch_up_rate(plain, self._demand.at_rate(settled), observation, now_s=now_s)
        # A backlog raises `now` above the observed rate; waits that it causes are not the error of the formulas.
        self._correction.update(observation, plain, now_s=now_s, is_steady=now.requests_per_s <= recent)
        sizer = replace(plain, corrections=self._correction.value)
        coming = coming_demand(self._demand, prediction, settled)
        inputs = replace(
            inputs,
            observed=self._demand.at_rate(recent).load,
            predicted=coming.load,
            predictor=prediction.predictor,
            predictor_error=prediction.error,
            ttft_correction=self._correction.value.wait,
            itl_correction=self._correction.value.itl,
        )
        most = coming.at_rate(coming.requests_per_s + catch_up)
        # Routers have the bound already.
        ready = replace(observation.ready, deflect_tokens=self._wanted.deflect_tokens)
        situation = Situation(now=now, coming=most, ready=ready, wanted=self._wanted)
        sizing = sizer.size(most)
        # The stabiliser must not remember sizes that only a backlog needs, or pools would keep them for `calm_s`.
        lasting = sizer.size(coming).shape if catch_up else sizing.shape
        sized = larger(self._stabiliser.settle(lasting, self._wanted, now_s), sizing.shape)
        choice = self._choose(sizer, situation, sizing, sized=sized, now_s=now_s)
        if not choice.action.changes_pools:
            choice = self._deflect_surge(sizer, situation, rate=observation.surge_rate, now_s=now_s) or choice
        return choice, inputs

    def _update_bursts(self, observation: ModelObservation, now_s: float) -> Bursts | None:
        """Adds what arrived since the last tick. The replays change once per `interval_s`, since they take more time than the formulas."""
        before_s, self._ticked_s = self._ticked_s, now_s
        if before_s is not None and observation.newest_tokens is not None:
            self._burst_history.add(now_s - before_s, observation.newest_tokens)
        if now_s - self._bursts_s >= self._settings.interval_s:
            self._bursts, self._bursts_s = self._burst_history.bursts(), now_s
        return self._bursts

    def _smoothed(self, rate: float, targets: Targets, now_s: float) -> float:
        """Returns the rate over about half of the TTFT target: requests of a shorter burst can wait without missing it."""
        passed_s, self._smoothed_s = now_s - self._smoothed_s, now_s
        smoothing_s = (targets.ttft_s or 0.0) / 2
        # The first call comes an infinite time after NEVER, so its weight is 1.
        weight = 1 - math.exp(-passed_s / smoothing_s) if smoothing_s else 1.0
        self._rate += weight * (rate - self._rate)
        return self._rate

    @property
    def wanted(self) -> Shape | None:
        """The pools that are wanted. None before the first tick."""
        return self._wanted

    @property
    def deflection(self) -> int:
        """The bound that routers should have."""
        return self._wanted.deflect_tokens if self._wanted is not None else 0

    def accept(self, decision: Decision, now_s: float) -> None:
        """Called when the decision was carried out."""
        before = decision.inputs.wanted
        self._wanted = decision.shape
        self._acted_s = now_s
        if decision.shape.prefill_workers > before.prefill_workers:
            self._grown_s = now_s
        if decision.action is DecisionAction.FLIP:
            self._flipped_s = now_s
            self._flipped_to_prefill = decision.shape.prefill_workers - before.prefill_workers
        if decision.action is DecisionAction.DEFLECT:
            self._deflected_s = now_s
        if decision.action in (DecisionAction.FLIP, DecisionAction.SCALE):
            self._correction.restart(now_s)
            # Pools of another size may need another bound immediately.
            self._deflected_s = NEVER

    def _adopt(self, observation: ModelObservation, wanted: Shape | None, now_s: float) -> None:
        """Adopts sizes that somebody set by hand, and does not change them for a while."""
        if wanted is None:
            # Nobody states sizes: until the planner changes one, what is ready is wanted, so that workers that start later count.
            if self._wanted is None or (self._acted_s == NEVER and not self._is_confirmed):
                deflect_tokens = self._wanted.deflect_tokens if self._wanted is not None else 0
                self._wanted = replace(observation.ready, deflect_tokens=deflect_tokens)
            return
        is_first, self._is_confirmed = not self._is_confirmed, True
        if self._wanted is None or is_first:
            self._wanted = wanted
        # The connector counts a worker that flips when it has flipped.
        elif sizes(wanted) != sizes(self._wanted) and now_s - self._acted_s >= ACTION_SETTLES_S:
            self._wanted = replace(wanted, deflect_tokens=self._wanted.deflect_tokens)
            self._held_until_s = now_s + self._settings.hold_s
            self._stabiliser.restart()

    def _held(
        self, observation: ModelObservation, targets: Targets | None, speed: Speed | None, *, now_s: float
    ) -> ActionChoice | None:
        if observation.state is not ObservationState.COMPLETE:
            detail = "; ".join(observation.problems)
            return ActionChoice(
                action=DecisionAction.HOLD, reason=f"observation_{observation.state.value}", detail=detail
            )
        if targets is None and self._thresholds is None:
            return ActionChoice(action=DecisionAction.HOLD, reason="no_targets", detail="the model has no targets")
        if speed is None and self._thresholds is None:
            detail = "no worker of the model registered how fast it is"
            return ActionChoice(action=DecisionAction.HOLD, reason="no_profile", detail=detail)
        if now_s < self._held_until_s:
            detail = f"the sizes were changed by hand; the planner waits for {self._held_until_s - now_s:.0f} s more"
            return ActionChoice(action=DecisionAction.HOLD, reason="manual_change", detail=detail)
        return None

    def _with_backlog(self, demand: Demand, observation: ModelObservation, speed: Speed, *, targets: Targets) -> Demand:
        """Adds the backlog that the pool cannot compute within half of the TTFT target."""
        harmless = harmless_tokens(observation.ready, targets, speed.prefill_s_per_token)
        excess = max(0.0, observation.backlog_tokens - harmless)
        return demand.at_rate(demand.requests_per_s + excess / BACKLOG_S / max(1.0, demand.prompt_tokens))

    def _choose_by_thresholds(
        self, thresholds: Thresholds, observation: ModelObservation, targets: Targets | None, *, now_s: float
    ) -> ActionChoice:
        assert self._wanted is not None
        wanted = self._wanted
        shape = thresholds.choose(observation, wanted, targets, now_s=now_s)
        detail = f"{observation.backlog_tokens:.0f} prompt tokens wait, {observation.kv_usage or 0.0:.0%} of the KV blocks are in use"
        if sizes(shape) == sizes(wanted):
            return ActionChoice(action=DecisionAction.KEEP, reason="within_thresholds", detail=detail)
        grows = sum(sizes(shape)) > sum(sizes(wanted))
        cost = partial(cost_of, targets=targets or Targets(model=self.model))
        return ActionChoice(
            action=DecisionAction.SCALE,
            reason="above_threshold" if grows else "below_threshold",
            detail=detail,
            alternatives=[
                Alternative(action=DecisionAction.SCALE, shape=shape, takes_s=self._settings.start_s, cost=cost(shape)),
                Alternative(action=DecisionAction.KEEP, shape=wanted, cost=cost(wanted)),
            ],
        )

    def _catch_up_rate(self, sizer: Sizer, demand: Demand, observation: ModelObservation, *, now_s: float) -> float:
        """Returns what new workers must serve beyond the load, so that a backlog does not outlive them."""
        assert self._wanted is not None
        settings = self._settings
        grows = self._wanted.prefill_workers > observation.ready.prefill_workers
        return catch_up_rate(
            sizer,
            demand,
            backlog_tokens=observation.backlog_tokens,
            ready=observation.ready,
            wanted=self._wanted,
            ready_in_s=min(settings.start_s, max(0.0, self._grown_s + settings.start_s - now_s))
            if grows
            else settings.start_s,
            start_s=settings.start_s,
            catch_up_s=CATCH_UP_S,
        )

    def _choose(
        self, sizer: Sizer, situation: Situation, sizing: Sizing, *, sized: Shape, now_s: float
    ) -> ActionChoice:
        """`sized`: the pools to have. Those for the load alone are kept for `calm_s`, those for a backlog only as long as there is one."""
        evaluator = Evaluator(sizer, self._settings, situation)
        keep = evaluator.keep()
        rate = situation.coming.requests_per_s
        if keep.goodput_per_s >= rate * (1 - TOLERANCE) and not self._is_short(sizing, situation):
            return self._save(sizer, evaluator, keep, sized=sized, situation=situation, now_s=now_s)
        self._short_s = now_s
        others = [*self._deflections(evaluator, now_s), *self._flips(evaluator, now_s)]
        if sizes(sized) != sizes(situation.wanted):
            others.append(evaluator.scale(sized))
        better = [each for each in others if each.goodput_per_s >= keep.goodput_per_s + self._least_gain(each) * rate]
        ordered = [*fastest_first(better, rate), keep] if better else [keep, *best_first(others, rate)]
        if ordered[0].action is DecisionAction.DEFLECT and not any(
            each.action is DecisionAction.FLIP for each in better
        ):
            # New workers take long, so they start with the deflection where only they can help further.
            with_scale = [each for each in better if each.action is DecisionAction.SCALE]
            deflects_more = ordered[0].shape.deflect_tokens > situation.wanted.deflect_tokens
            if with_scale and deflects_more and with_scale[0].goodput_per_s > ordered[0].goodput_per_s:
                both = replace(sized, deflect_tokens=ordered[0].shape.deflect_tokens)
                ordered = [evaluator.scale(both), *ordered]
        ordered = [replace(each, limit=sizing.limit) for each in ordered]
        best = ordered[0]
        if best.action is DecisionAction.KEEP:
            reason = f"limited_by_{sizing.limit}" if sizing.limit else "waits_for_workers"
            detail = f"no change raises the goodput by {GAIN_MIN:.0%}{_because(sizing.limit)}"
            return ActionChoice(action=best.action, reason=reason, detail=detail, alternatives=ordered)
        detail = (
            f"{best.goodput_per_s:.2f} of {rate:.2f} requests/s within targets instead of {keep.goodput_per_s:.2f}"
            f"{_because(sizing.limit)}"
        )
        return ActionChoice(action=best.action, reason=_shortage(sizer, situation), detail=detail, alternatives=ordered)

    def _deflect_surge(self, sizer: Sizer, situation: Situation, *, rate: float, now_s: float) -> ActionChoice | None:
        """Returns the best deflection if the newest requests were the present load.

        None: there is no surge, the pools serve it, or a bound is set already.
        """
        if rate <= situation.now.requests_per_s or situation.wanted.deflect_tokens:
            return None
        surge = situation.now.at_rate(rate)
        evaluator = Evaluator(sizer, self._settings, replace(situation, now=surge, coming=surge))
        keep = evaluator.keep()
        least = keep.goodput_per_s + GAIN_MIN * rate
        better = [each for each in self._deflections(evaluator, now_s) if each.goodput_per_s >= least]
        if not better:
            return None
        self._short_s = now_s
        best = best_first(better, rate)
        return ActionChoice(
            action=DecisionAction.DEFLECT,
            reason=_shortage(sizer, replace(situation, now=surge)),
            detail=f"{rate:.1f} requests/s arrived since the last decision",
            alternatives=[*best, keep],
        )

    def _is_short(self, sizing: Sizing, situation: Situation) -> bool:
        """Returns True when the targets cannot be met, and pools within the limits are larger than the present ones."""
        return bool(sizing.limit) and (
            sizing.shape.prefill_workers > situation.wanted.prefill_workers
            or sizing.shape.decode_workers > situation.wanted.decode_workers
        )

    def _save(
        self,
        sizer: Sizer,
        evaluator: Evaluator,
        keep: Alternative,
        *,
        sized: Shape,
        situation: Situation,
        now_s: float,
    ) -> ActionChoice:
        """Saves cost while the targets are kept. Ends a deflection, or shrinks, if the targets are kept then too."""
        wanted = situation.wanted
        if wanted.deflect_tokens and now_s - self._short_s >= DEFLECT_CALM_S:
            plain = evaluator.deflect(0)
            if plain.goodput_per_s >= keep.goodput_per_s * (1 - TOLERANCE):
                detail = "the prefill workers keep the targets by themselves"
                return ActionChoice(
                    action=DecisionAction.DEFLECT,
                    reason="shortage_over",
                    detail=detail,
                    alternatives=[plain, keep],
                )
        if sizer.cost(sized) < sizer.cost(wanted):
            # Headroom for past errors is a margin already.
            least = situation.now.requests_per_s * (1 + SHRINK_MARGIN)
            margin = situation.coming.at_rate(max(least, situation.coming.requests_per_s))
            if sizer.forecast(margin, replace(sized, deflect_tokens=0)).meets:
                smaller = evaluator.scale(sized)
                detail = f"fewer workers keep the targets, and did for {self._settings.calm_s:g} s"
                return ActionChoice(
                    action=DecisionAction.SCALE, reason="spare_workers", detail=detail, alternatives=[smaller, keep]
                )
        return ActionChoice(
            action=DecisionAction.KEEP, reason="meets_targets", detail="the pools keep the targets", alternatives=[keep]
        )

    def _least_gain(self, alternative: Alternative) -> float:
        """Changing one bound of deflection for another must gain more: the formulas only estimate what the router does with it."""
        is_retuned = self._wanted is not None and self._wanted.deflect_tokens > 0
        is_deflection = alternative.action is DecisionAction.DEFLECT
        return GAIN_MIN * (RETUNING if is_deflection and is_retuned else 1.0)

    def _deflections(self, evaluator: Evaluator, now_s: float) -> list[Alternative]:
        if now_s - self._deflected_s < DEFLECT_DWELL_S:
            return []
        return list(evaluator.deflections())

    def _flips(self, evaluator: Evaluator, now_s: float) -> list[Alternative]:
        since_s = now_s - self._flipped_s
        if not self._settings.flips or since_s < FLIP_DWELL_S:
            return []
        is_new = since_s >= 2 * FLIP_DWELL_S
        flips = list(evaluator.flips())
        return [each for each in flips if is_new or _to_prefill(each, self._wanted) * self._flipped_to_prefill > 0]


def larger(one: Shape, other: Shape) -> Shape:
    """Returns the larger size of each pool."""
    return replace(
        one,
        prefill_workers=max(one.prefill_workers, other.prefill_workers),
        decode_workers=max(one.decode_workers, other.decode_workers),
    )


def sizes(shape: Shape) -> tuple[int, int]:
    return shape.prefill_workers, shape.decode_workers


def _to_prefill(alternative: Alternative, wanted: Shape | None) -> int:
    return alternative.shape.prefill_workers - (wanted.prefill_workers if wanted is not None else 0)


def _because(limit: str) -> str:
    return f"; the targets cannot be met because of {limit}" if limit else ""


def _shortage(sizer: Sizer, situation: Situation) -> str:
    """Returns which pool is too small: the one whose growth alone would help."""
    ready, demand = situation.ready, situation.now
    if demand.requests_per_s < situation.coming.requests_per_s:
        demand, ready = situation.coming, situation.wanted
    present = sizer.goodput_per_s(demand, ready)
    prefill = sizer.goodput_per_s(demand, replace(ready, prefill_workers=2 * ready.prefill_workers + 1))
    decode = sizer.goodput_per_s(demand, replace(ready, decode_workers=2 * ready.decode_workers + 1))
    if prefill > present and prefill >= decode:
        return "prefill_short"
    return "decode_short" if decode > present else "both_short"
