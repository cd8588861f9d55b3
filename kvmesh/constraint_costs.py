"""Estimates what a constraint costs to compile, without compiling it.

Engines compile a schema, regular expression or grammar to an automaton, in time and memory that grow with the automaton and not with
the text: `{"minimum": 0, "maximum": 10**15}` takes as much as a hundred plain properties, `(a{1000}){1000}` a million states. The cost is
about the number of states. With xgrammar 0.2 a cost of 80 000 takes 1 CPU-second (400 integers with a range).
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import InvalidRequestError

COST_MAX = 50_000
"""About half a CPU-second."""
COST_LIMIT = 1 << 40
INLINE_CHARACTERS = 8192
"""Estimating the cost of a text of this length takes about a millisecond."""
VERDICTS_MAX = 1024
RANGE_COST = 200
"""Of a number with a minimum or maximum: an expression over its digits."""
VALUES_PER_STATE = 8
"""Characters of a length limit for each state: engines count repetitions of one class of characters."""
DEPTH_MAX = 128
NODES_MAX = 50_000
_RANGE_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_PATTERN_WORDS = ("pattern", "regex")
_SAME_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply to the value itself, as `$ref` does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cost of a constraint, and what is wrong with it; empty if nothing is."""

    cost: int
    problem: str


_verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
"""By digest: constraints themselves can be megabytes long."""


def check_constraint(constraint: Constraint, field: str) -> None:
    """Raises InvalidRequestError if the constraint is malformed, refers to itself without end, or is too expensive to compile."""
    if problem := judge(constraint).problem:
        reason = "constraint_too_complex" if problem.startswith("is too") else "invalid_value"
        raise InvalidRequestError(f"{field} {problem}", field=field, reason=reason)


def judge(constraint: Constraint) -> Verdict:
    """Returns the verdict, which is kept. Safe in any thread. On an event loop `judge_long` comes first."""
    digest = constraint_digest(constraint)
    verdict = _verdicts.get(digest)
    if verdict is None:
        verdict = _verdicts[digest] = _estimate(constraint)
        while len(_verdicts) > VERDICTS_MAX:
            _verdicts.popitem(last=False)
    return verdict


def is_long(constraint: Constraint) -> bool:
    """Returns whether estimating the cost takes long enough for a thread."""
    return len(constraint.text) > INLINE_CHARACTERS


async def judge_long(constraint: Constraint) -> None:
    """Estimates the cost of a long constraint in a thread. Checks on the event loop then find the verdict, which is kept."""
    if is_long(constraint):
        await asyncio.to_thread(judge, constraint)


def constraint_digest(constraint: Constraint) -> bytes:
    """Returns a name for the constraint that no other has."""
    digest = blake2b(f"{constraint.kind.value} {len(constraint.options)}".encode(), digest_size=32)
    for part in (constraint.text, *constraint.options):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f" {len(data)} ".encode())
        digest.update(data)
    return digest.digest()


def _estimate(constraint: Constraint) -> Verdict:
    kind = constraint.kind
    if kind is ConstraintKind.JSON_OBJECT:
        cost = 0
    elif kind is ConstraintKind.CHOICE:
        cost = sum(map(len, constraint.options))
    elif kind is ConstraintKind.REGEX or kind is ConstraintKind.GRAMMAR:
        cost = pattern_cost(constraint.text)
    else:
        try:
            schema = _Schema(json.loads(constraint.text))
        except (ValueError, RecursionError):
            return Verdict(0, "must be a JSON document that is not nested too deeply")
        cost = schema.cost()
        if cost <= COST_MAX and schema.has_endless_reference():
            return Verdict(cost, "has a $ref that leads back to itself")
    return Verdict(
        cost, f"is too complex: its cost is at least {cost}, the limit {COST_MAX}" if cost > COST_MAX else ""
    )


def pattern_cost(pattern: str) -> int:
    """Returns an upper estimate of the states of a regular expression, or of a grammar in EBNF, which repeats in the same way."""
    costs, last = [0], 0
    place = 0
    while place < len(pattern):
        each = pattern[place]
        place += 1
        if each == "\\":
            place += 1
            last = 1
        elif each == "[":
            end = _class_end(pattern, place)
            last, place = 1 + (end - place) // 8, end
        elif each == "(":
            costs.append(0)
            last = 0
            continue
        elif each == ")" and len(costs) > 1:
            last = costs.pop()
        elif each == "{" and (found := _count(pattern, place)) is not None:
            count, place = found
            costs[-1] = min(COST_LIMIT, costs[-1] + max(0, count - 1) * max(1, last))
            continue
        else:
            last = 1
        costs[-1] = min(COST_LIMIT, costs[-1] + last)
    return min(COST_LIMIT, sum(costs))


def _class_end(pattern: str, place: int) -> int:
    """Returns the place after the class of characters that begins at `place`."""
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return min(len(pattern), place + 1)


def _count(pattern: str, place: int) -> tuple[int, int] | None:
    """Returns the largest count of `{n}`, `{n,}` or `{n,m}`, and the place after it. None: the brace is something else."""
    end = pattern.find("}", place, place + 32)
    parts = pattern[place:end].replace(" ", "").split(",") if end >= 0 else ["x"]
    if len(parts) > 2 or not all(part.isdecimal() or not part for part in parts) or not any(parts):
        return None
    return max(int(part or 0) for part in parts), end + 1


class _Schema:
    """A JSON Schema, or a document that contains schemas."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def cost(self) -> int:
        """Returns the cost of the whole document: that of each part times the repetitions of the parts around it.

        Stops above COST_MAX, so that refusing a document costs no more than accepting one.
        """
        total = nodes = 0
        waiting: list[tuple[Any, int, int]] = [(self._root, 1, 0)]
        while waiting and total <= COST_MAX:
            value, times, depth = waiting.pop()
            nodes += 1
            if nodes > NODES_MAX or depth > DEPTH_MAX:
                return COST_LIMIT
            if isinstance(value, dict):
                total += times * _own_cost(value)
                inner = min(COST_LIMIT, times * _repetitions(value))
                waiting += [
                    (each, inner if name in ("items", "additionalItems", "contains") else times, depth + 1)
                    for name, each in value.items()
                    if isinstance(each, dict | list)
                ]
            elif isinstance(value, list):
                total += times * sum(max(1, len(each)) if isinstance(each, str) else 1 for each in value)
                waiting += [(each, times, depth + 1) for each in value if isinstance(each, dict | list)]
        return min(COST_LIMIT, total)

    def has_endless_reference(self) -> bool:
        """Returns whether a `$ref` leads back to itself without a step into the value, so that no document could ever be read."""
        settled: set[int] = set()
        return any(self._is_endless(each, settled) for each in self._objects() if "$ref" in each)

    def _is_endless(self, start: Mapping[str, Any], settled: set[int]) -> bool:
        """Depth first, with a stack of iterators: a chain of references can be as long as the document."""
        path: list[tuple[int, Iterator[Any]]] = [(id(start), self._same_place(start))]
        on_path = {id(start)}
        while path:
            known, following = path[-1]
            each = next(following, None)
            if each is None:
                path.pop()
                on_path.discard(known)
                settled.add(known)
            elif id(each) in on_path:
                return True
            elif id(each) not in settled:
                on_path.add(id(each))
                path.append((id(each), self._same_place(each)))
        return False

    def _same_place(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the schemas that apply to the same value."""
        target = self._resolved(schema.get("$ref"))
        found = [target, *(each for word in _SAME_PLACE for each in _list(schema.get(word)))]
        return (each for each in found if isinstance(each, dict))

    def _resolved(self, reference: Any) -> Any:
        value = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        for part in reference[1:].strip("/").split("/") if reference.strip("#/") else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value

    def _objects(self) -> Iterator[Mapping[str, Any]]:
        waiting, nodes = [self._root], 0
        while waiting and nodes <= NODES_MAX:
            value = waiting.pop()
            nodes += 1
            if isinstance(value, dict):
                yield value
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value


def _own_cost(schema: Mapping[str, Any]) -> int:
    cost = 1 + len(schema)
    if any(word in schema for word in _RANGE_WORDS):
        cost += RANGE_COST
    for word in ("minLength", "maxLength"):
        cost += _whole(schema.get(word)) // VALUES_PER_STATE
    cost += sum(pattern_cost(value) for word in _PATTERN_WORDS if isinstance(value := schema.get(word), str))
    cost += sum(pattern_cost(name) for name in _dict(schema.get("patternProperties")))
    cost += sum(len(name) // 4 for name in _dict(schema.get("properties")))
    return cost + len(value) if isinstance(value := schema.get("const"), str) else cost


def _repetitions(schema: Mapping[str, Any]) -> int:
    return max(1, *(_whole(schema.get(word)) for word in ("minItems", "maxItems")))


def _whole(value: Any) -> int:
    return min(COST_LIMIT, int(value)) if isinstance(value, int | float) and 0 <= value < COST_LIMIT else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
