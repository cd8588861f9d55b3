"""The decoding legs. Each gets a token per step, and a new block when its last one is full.

The steps in which a leg needs a block or ends are known when it joins. So a step touches only the legs that are due in it, and those
whose every token must be examined (stop tokens, log-probabilities).
"""

from collections.abc import Callable, Iterable

from kvmesh.core import ModelCard
from kvmesh.engines.simulated.batch import DecodeBatch
from kvmesh.engines.simulated.block_writer import seal_blocks
from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.leg_state import Phase, SimulatedLeg
from kvmesh.engines.simulated.memory import KvMemory
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import Step
from kvmesh.engines.simulated.tokens import biased_token, made_up_logprob

Ends = dict[SimulatedLeg, int | None]
"""Legs that got their last token, with the stop token if it is one."""


def steered_token(leg: SimulatedLeg, *, position: int, token_id: int, token_range: TokenRange) -> int:
    """Returns the token of a steered leg at this position. `token_id` is the arithmetic's."""
    if leg.script is not None:
        return leg.scripted(position)
    return biased_token(token_id, leg.bias, token_range)


def last_token(leg: SimulatedLeg) -> int:
    """Returns the number of the leg's last possible token, from 1."""
    return min(leg.eos_at, leg.tokens_max) if leg.eos_at else leg.tokens_max


def is_stop(leg: SimulatedLeg, token_id: int, generated: int) -> bool:
    """Returns True when the leg's token number `generated` is a stop token and `min_tokens` is reached."""
    if token_id not in leg.stop_ids:
        return False
    generation = leg.request.generation
    return generated + len(generation.emitted_token_ids) > (generation.sampling.min_tokens or 0)


def is_watched(leg: SimulatedLeg) -> bool:
    """Returns True when every token of the leg must be examined."""
    return bool(leg.stop_ids) or leg.request.generation.sampling.logprobs is not None


def score_prompt(leg: SimulatedLeg, step: Step, card: ModelCard) -> None:
    """Adds the prompt's log-probabilities if the leg asked for them: once, even when the prompt is computed again."""
    generation = leg.request.generation
    asked = generation.sampling.prompt_logprobs
    if asked is None or leg.has_scored_prompt or generation.emitted_token_ids:
        return
    leg.has_scored_prompt = True
    step.prompt_logprobs[leg.key] = [
        made_up_logprob(token_id, alternatives=asked, vocabulary_size=card.vocabulary_size)
        for token_id in generation.token_ids[1:]
    ]


def add_logprob(leg: SimulatedLeg, *, token_id: int, step: Step, card: ModelCard) -> None:
    """Adds the token's log-probability if the leg asked for it."""
    asked = leg.request.generation.sampling.logprobs
    if asked is not None:
        logprob = made_up_logprob(token_id, alternatives=asked, vocabulary_size=card.vocabulary_size)
        step.logprobs.setdefault(leg.key, []).append(logprob)


class Decoding:
    """Legs in phase DECODE. `preempt_one` takes the blocks of some leg, maybe one of these, when no block is available."""

    def __init__(
        self,
        *,
        settings: SimulatedSettings,
        card: ModelCard,
        token_range: TokenRange,
        memory: KvMemory,
        pool: BlockPool,
        preempt_one: Callable[[], None],
    ) -> None:
        self._size = settings.block_size_tokens
        self._card = card
        self._memory = memory
        self._pool = pool
        self._preempt_one = preempt_one
        # A leg is flushed whenever it gets a block, so no leg has more unflushed tokens than a block holds.
        self._batch = DecodeBatch(self._size + 1, token_range)
        # By step. Dicts serve as ordered sets: the order of a set depends on object addresses, and a simulation must repeat exactly.
        self._grow_at: dict[int, dict[SimulatedLeg, None]] = {}
        self._end_at: dict[int, dict[SimulatedLeg, None]] = {}
        self._watched: dict[SimulatedLeg, None] = {}
        self._steered: dict[SimulatedLeg, None] = {}
        self._range = token_range

    def __len__(self) -> int:
        return len(self._batch)

    @property
    def legs(self) -> list[SimulatedLeg]:
        return self._batch.legs

    def generated(self, leg: SimulatedLeg) -> int:
        return len(leg.tokens) - leg.start_tokens + self._batch.unflushed(leg)

    def total(self, leg: SimulatedLeg) -> int:
        """Returns the checksum of all the leg's tokens plus its constant, as `add` needs it."""
        return self._batch.totals([leg])[0]

    def add(self, leg: SimulatedLeg, total: int) -> None:
        """Adds a leg that has its first token. `total` is the checksum of all its tokens plus its constant."""
        leg.phase = Phase.DECODE
        self._batch.add(leg, total)
        self._plan_growth(leg)
        # The leg's last token is made in the call of `step` that raises `batch.steps` to this number.
        leg.end_step = self._batch.steps + last_token(leg) - self.generated(leg)
        self._end_at.setdefault(leg.end_step, {})[leg] = None
        if is_watched(leg):
            self._watched[leg] = None
        if leg.is_steered:
            self._steered[leg] = None

    def remove(self, leg: SimulatedLeg) -> None:
        """Removes a leg. Its tokens are in `leg.tokens` afterwards, and full blocks have their names."""
        self._seal([leg])
        self._batch.remove(leg)
        self._watched.pop(leg, None)
        self._steered.pop(leg, None)
        self._end_at.get(leg.end_step, {}).pop(leg, None)
        self._grow_at.get(leg.grow_step, {}).pop(leg, None)

    def step(self, step: Step) -> tuple[list[int], list[int], Ends]:
        """Keys, their next tokens, and the legs that end with this step."""
        batch = self._batch
        growing = self._grow_at.pop(batch.steps, None)
        # Before the keys are read, because growing may preempt legs.
        if growing:
            self._grow(list(growing))
        keys = batch.keys.copy()
        token_ids = batch.step(self._steered_tokens() if self._steered else {})
        ending = self._end_at.pop(batch.steps, None)
        if ending or self._watched:
            return keys, token_ids, self._ends(ending or (), token_ids, step)
        return keys, token_ids, {}

    def _steered_tokens(self) -> dict[int, int]:
        """Next tokens of constrained and biased legs, by slot."""
        batch = self._batch
        return {
            leg.slot: steered_token(
                leg,
                position=len(leg.tokens) + batch.unflushed(leg),
                token_id=batch.next_token(leg),
                token_range=self._range,
            )
            for leg in self._steered
        }

    def _ends(self, ending: Iterable[SimulatedLeg], token_ids: list[int], step: Step) -> Ends:
        ends: Ends = {}
        for leg in ending:
            ends[leg] = None
            if leg.eos_at == self.generated(leg):
                ends[leg] = token_ids[leg.slot] = self._card.eos_token_ids[0]
        for leg in self._watched:
            token_id = token_ids[leg.slot]
            add_logprob(leg, token_id=token_id, step=step, card=self._card)
            if is_stop(leg, token_id, generated=self.generated(leg)):
                ends[leg] = token_id
        return ends

    def _grow(self, legs: list[SimulatedLeg]) -> None:
        """Gives each leg a new block. The full blocks get their names."""
        self._seal(legs)
        for leg in legs:
            # The preempted leg may be this one, or a later one of this list.
            while leg.phase is Phase.DECODE and not self._pool.available:
                self._preempt_one()
            if leg.phase is Phase.DECODE:
                leg.blocks.append(self._pool.allocate_one())
                self._plan_growth(leg)

    def _seal(self, legs: list[SimulatedLeg]) -> None:
        self._batch.flush(legs)
        full = [leg for leg in legs if (len(leg.tokens) - 1) % self._size == 0]
        if full:
            seal_blocks(
                full,
                totals=self._batch.totals(full),
                memory=self._memory,
                pool=self._pool,
                block_size_tokens=self._size,
            )

    def _plan_growth(self, leg: SimulatedLeg) -> None:
        """Computes the step in which the leg's blocks are full. Its newest token is not in a block yet."""
        room = len(leg.blocks) * self._size - (len(leg.tokens) - 1)
        leg.grow_step = self._batch.steps + room
        self._grow_at.setdefault(leg.grow_step, {})[leg] = None
