"""A Jinja environment with limits for the templates of models, which are untrusted code.

Jinja's sandbox denies templates access to the process's objects and changes to their arguments. This environment also counts
every step that a loop can consist of (an attribute, an item, a call, a multiplication) and checks the size of results that
could grow without limit before they are computed.
"""

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from services.frontend.text.sandbox_sizes import FILTERS, METHODS, REMOVED_FILTERS, formatted, items_of, joined

STEPS_MAX = 5_000_000
"""Attributes, items and calls of one rendering; a million take about half a second."""
CHARACTERS_MAX = 16_777_216
"""Longest rendered prompt, and longest intermediate value: three times the text of a million tokens."""


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
TOO_LARGE_TEXT = "a value grows too large"
_CONCAT = "kvmesh_concat"
TOO_MANY = "it takes too many steps"
_SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that compiled templates pass with each call, for functions that take the context."""
_DICT_NAMES = frozenset(dir(dict))


class _Concatenations(jinja2.visitor.NodeTransformer):
    """Replaces `a ~ b`."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 (the name is the base class's)
        values = jinja2.nodes.List([self.visit(each) for each in node.nodes])
        return jinja2.nodes.Filter(values, _CONCAT, [], [], None, None).set_lineno(node.lineno)


class _Steps(threading.local):
    """Steps left to the rendering of a thread. The default is for constants, which are evaluated at compile time."""

    left = 1_000_000


class LimitedEnvironment(_Sandbox):
    """Counts steps per thread; `begin` starts a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self._thread = _Steps()
        # Generates text of any length in one step.
        self.globals.pop("lipsum")
        for name in REMOVED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters["join"] = self._join
        self.filters[_CONCAT] = self._concat
        self.concat = self._joined  # type: ignore[method-assign]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter whose calls are counted and bounded."""
        bound = FILTERS.get(name)
        # Filters that take the context, the evaluation context or the environment have it before the value.
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            value = args[place] if len(args) > place else None
            self._step(1 + (len(value) >> 6 if isinstance(value, Sized) else 0))
            if bound is not None:
                self._check(bound(value, [*args[place + 1 :], *kwargs.values()], CHARACTERS_MAX))
            return function(*args, **kwargs)

        self.filters[name] = limited

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        """See the base class. `a ~ b` becomes a filter, since Jinja joins it without asking the environment."""
        return super()._generate(_Concatenations().visit(source), *args, **kwargs)

    def _check(self, size: int) -> None:
        if size > CHARACTERS_MAX:
            raise jinja2.TemplateError(TOO_LARGE_TEXT)

    def _joined(self, pieces: Iterable[str]) -> str:
        """Joins the pieces of a macro or a block."""
        known = pieces if isinstance(pieces, list | tuple) else list(pieces)
        self._check(sum(map(len, known)))
        return "".join(known)

    def _concat(self, values: Sequence[Any]) -> str:
        return self._joined([str(each) for each in values])

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """Jinja's filter `join`."""
        items = items_of(value, CHARACTERS_MAX)
        if attribute is not None:
            items = [self.getitem(each, attribute) for each in items]
        self._step(len(items))
        self._check(joined(str(d), items, 0))
        return str(d).join(map(str, items))

    def begin(self, steps_max: int | None = None) -> None:
        """Starts a rendering on this thread, of at most `steps_max` steps; None: STEPS_MAX."""
        self._thread.left = steps_max or STEPS_MAX

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

    # Names with two underscores, as in the base class: a template may pass keyword arguments of any other name.
    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """See the base class."""
        __self._step()
        if type(__obj) is jinja2.runtime.Macro:
            # A template may call its own macros. The checks of the base class would take as long as the call.
            for name in _SCOPES:
                kwargs.pop(name, None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        # The base class wraps `str.format`.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = __self._bounded(owner, method.__name__, args, kwargs=kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            # The loop over it may contain no counted step.
            __self._step(len(result))
        return result

    def _bounded(self, owner: Any, name: str, args: tuple[Any, ...], *, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Checks the size of a method's result before the call. Returns the arguments, with an iterator read."""
        self._step(len(owner) >> 6 if isinstance(owner, Sized) else 0)
        if name == "join" and args:
            items = items_of(args[0], CHARACTERS_MAX)
            self._step(len(items))
            self._check(joined(owner, items, 0))
            return (items, *args[1:])
        if (bound := METHODS.get(name)) is not None:
            self._check(bound(owner, [*args, *kwargs.values()], CHARACTERS_MAX))
        return args

    def call_binop(  # noqa: PLR0917  # Jinja calls it.
        self, context: jinja2.runtime.Context, operator_: str, left: Any, right: Any
    ) -> Any:
        """See the base class."""
        size = self._size(operator_, left, right)
        self._check(size)
        self._step(1 + (size >> 6))
        return super().call_binop(context, operator_, left, right)

    def _size(self, operator_: str, left: Any, right: Any) -> int:
        """Returns an upper bound of the result's characters, entries or bits."""
        if operator_ == "**":
            return int(left.bit_length() * abs(right)) if isinstance(left, int) and isinstance(right, int) else 0
        if operator_ == "%":
            return formatted(left, right) if isinstance(left, str) else 0
        if operator_ == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(count, int):
                    return len(many) * count
            return 0
        return operator.length_hint(left) + operator.length_hint(right) if isinstance(left, Sized) else 0
