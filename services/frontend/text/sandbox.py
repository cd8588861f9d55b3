"""A Jinja environment with limits for the templates of models, which are untrusted code.

Jinja's sandbox denies templates access to the process's objects and changes to their arguments. This environment also counts
every step that a loop can consist of (an attribute, an item, a call, a multiplication) and checks the size of results that
could grow without limit before they are computed.
"""

import operator
import threading
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering."""

    steps_max: int = setting(
        5_000_000, "Attributes, items and calls of one rendering; a million take about half a second.", min=1000
    )
    characters_max: int = setting(
        16_777_216, "Longest rendered prompt, and longest intermediate value, in characters.", min=1024
    )


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks generated text for training; rendering passes its content through."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is the base class's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Compiles the block to a call of `_pass`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Callable[[], str]) -> str:
        return caller()


_Sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment
TOO_MANY = "it takes too many steps"
_SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that compiled templates pass with each call, for functions that take the context."""
_DICT_NAMES = frozenset(dir(dict))


class _Steps(threading.local):
    """Steps left to the rendering of a thread. The default is for constants, which are evaluated at compile time."""

    left = 1_000_000


class LimitedEnvironment(_Sandbox):
    """Counts steps per thread; `begin` starts a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self._limits = limits
        self._thread = _Steps()

    def begin(self, steps_max: int | None = None) -> None:
        """Starts a rendering on this thread, of at most `steps_max` steps if that is below the limit."""
        self._thread.left = min(self._limits.steps_max, steps_max or self._limits.steps_max)

    def _step(self, steps: int = 1) -> None:
        self._thread.left -= steps
        if self._thread.left < 0:
            raise jinja2.TemplateError(TOO_MANY)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See the base class."""
        # Most steps are attributes and items, so they are counted without a function call.
        thread = self._thread
        thread.left -= 1
        if thread.left < 0:
            raise jinja2.TemplateError(TOO_MANY)
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            # The base class does the same after a failed attribute lookup. Messages are dicts.
            return obj[attribute]
        return _Sandbox.getattr(self, obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See the base class."""
        thread = self._thread
        thread.left -= 1
        if thread.left < 0:
            raise jinja2.TemplateError(TOO_MANY)
        return _Sandbox.getitem(self, obj, argument)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """See the base class."""
        __self._step()
        if type(__obj) is jinja2.runtime.Macro:
            # A template may call its own macros. The checks of the base class would take as long as the call.
            for name in _SCOPES:
                kwargs.pop(name, None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            # The loop over it may contain no counted step.
            __self._step(len(result))
        return result

    def call_binop(self, context: jinja2.runtime.Context, operator_: str, left: Any, right: Any) -> Any:
        """See the base class."""
        self._step()
        if self._size(operator_, left, right) > self._limits.characters_max:
            raise jinja2.TemplateError("a value grows too large")
        return super().call_binop(context, operator_, left, right)

    def _size(self, operator_: str, left: Any, right: Any) -> int:
        """Returns an upper bound of the result's characters, entries or bits."""
        if operator_ == "**":
            return int(left.bit_length() * abs(right)) if isinstance(left, int) and isinstance(right, int) else 0
        if operator_ == "%":
            return len(left) if isinstance(left, str) else 0
        if operator_ == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(count, int):
                    return len(many) * count
            return 0
        return operator.length_hint(left) + operator.length_hint(right) if isinstance(left, Sized) else 0
