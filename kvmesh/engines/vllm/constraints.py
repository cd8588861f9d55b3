"""Validates constraints as vLLM does, but costly ones off the event loop, once each, and within limits.

vLLM validates when it makes a request, which for a schema of 400 ranged integers takes 0.2 s of CPU. Here its validation runs in a thread,
after the constraint has been compiled in a process that can be killed (`grammar_check.py`). The result is kept by the constraint's digest.
"""

import asyncio
import copy
from collections import OrderedDict
from typing import Any

from kvmesh.constraint_costs import check_constraint, constraint_digest, is_long, judge
from kvmesh.core import Constraint, ConstraintKind
from kvmesh.engines.sampling_names import FIELD
from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.grammar_check import GrammarChecker
from kvmesh.engines.vllm.sampling import CONSTRAINTS, constraint_arguments
from kvmesh.errors import InvalidRequestError, OverloadedError

KEPT_MAX = 256
INLINE_COST_MAX = 500
"""Estimated cost up to which a constraint is checked on the event loop, in about a millisecond. A process of its own takes seconds to start."""
CHECKS_MAX = 16
"""Constraints that wait to be compiled; more are refused with Retry-After. Each takes up to `grammar_cpu_s_max`, one after the other."""
CONSTRAINT_FIELD = f"{FIELD}.constraint"


class VllmConstraints:
    """Validated constraints. Use it on the event loop only."""

    def __init__(self, core: VllmCore, *, cpu_s_max: int, wait_s_max: float) -> None:
        """The limits of compiling one constraint: CPU time, and the wait for it."""
        self._core = core
        self._checker = GrammarChecker(self._tokenizer, cpu_s_max=cpu_s_max, wait_s_max=wait_s_max)
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        """StructuredOutputsParams, or the InvalidRequestError of a refusal, by digest."""

    def is_ready(self, constraint: Constraint | None) -> bool:
        """Returns whether a request with the constraint can be made immediately."""
        if constraint is None or constraint.kind is ConstraintKind.JSON_OBJECT:
            return True
        if is_long(constraint):
            return constraint_digest(constraint) in self._kept
        return judge(constraint).cost <= INLINE_COST_MAX or constraint_digest(constraint) in self._kept

    def validated(self, constraint: Constraint | None) -> Any:
        """Returns vLLM's parameters of a constraint that was `prepared`; None if vLLM has to validate it. Raises its refusal."""
        found = self._kept.get(constraint_digest(constraint)) if constraint is not None else None
        if isinstance(found, InvalidRequestError):
            raise found
        # vLLM writes to the parameters of a request.
        return copy.copy(found)

    async def prepare(self, constraint: Constraint) -> None:
        """Validates a constraint and keeps the result, which may be a refusal. Cancelling it stops the compilation.

        Raises OverloadedError or UnavailableError.
        """
        if self._waiting >= CHECKS_MAX:
            raise OverloadedError(
                "too many constraints are being compiled", reason="constraints_full", retry_after_s=1.0
            )
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                digest = constraint_digest(constraint)
                # An earlier holder of the lock may have validated the same constraint.
                if digest not in self._kept:
                    self._kept[digest] = await self._result(constraint)
                    while len(self._kept) > KEPT_MAX:
                        self._kept.popitem(last=False)
        finally:
            self._waiting -= 1

    async def _result(self, constraint: Constraint) -> Any:
        try:
            await asyncio.to_thread(check_constraint, constraint, CONSTRAINT_FIELD)
            if constraint.kind in CONSTRAINTS:
                await self._checker.check(CONSTRAINTS[constraint.kind], constraint.text, CONSTRAINT_FIELD)
            return await asyncio.to_thread(self._validate, constraint)
        except InvalidRequestError as error:
            return error

    async def aclose(self) -> None:
        """Ends the process, if there is one."""
        await self._checker.aclose()

    def _validate(self, constraint: Constraint) -> Any:
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        processor = self._core.input_processor
        try:
            parameters = StructuredOutputsParams(**constraint_arguments(constraint))
            sampling = SamplingParams(structured_outputs=parameters)
            sampling.verify(
                processor.model_config,
                processor.speculative_config,
                processor.structured_outputs_config,
                processor.tokenizer,
            )
        except (VLLMError, ValueError, NotImplementedError) as error:
            message = f"vLLM refused the request: {str(error).splitlines()[0]}"
            raise InvalidRequestError(message, field=CONSTRAINT_FIELD) from error
        return sampling.structured_outputs

    def _tokenizer(self) -> str:
        import xgrammar

        vocabulary_size = self._core.config.model_config.get_vocab_size()
        info = xgrammar.TokenizerInfo.from_huggingface(self._core.input_processor.tokenizer, vocab_size=vocabulary_size)
        return str(info.serialize_json())
