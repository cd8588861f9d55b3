"""One document for any kind of constraint that can be made up."""

import json
from random import Random
from typing import Any

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.engines.simulated.documents.refusal import refused
from kvmesh.engines.simulated.documents.regex import make_match
from kvmesh.engines.simulated.documents.schema import make_instance
from kvmesh.engines.simulated.documents.tags import make_tagged


def make_document(constraint: Constraint, random: Random) -> str:
    """A text that matches. The same constraint and state of `random` give the same text.

    UnsupportedError for what cannot be made up: grammars, and the parts of schemas and expressions that the makers name.
    InvalidRequestError where the document is broken.
    """
    try:
        return _made(constraint, random)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        # Documents are foreign JSON: any value may stand anywhere.
        raise refused(f"a broken document ({type(error).__name__})", is_wrong=True) from error


def _made(constraint: Constraint, random: Random) -> str:
    match constraint.kind:
        case ConstraintKind.CHOICE:
            return random.choice(list(constraint.options))
        case ConstraintKind.JSON_OBJECT:
            return dump(make_instance({"type": "object", "minProperties": 1}, random))
        case ConstraintKind.JSON_SCHEMA:
            return dump(make_instance(parsed(constraint.text), random))
        case ConstraintKind.REGEX:
            return make_match(constraint.text, random)
        case ConstraintKind.STRUCTURAL_TAG:
            return make_tagged(parsed(constraint.text), random)
        case _:
            raise refused("a grammar")


def parsed(text: str) -> Any:
    """A JSON document of a request."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise refused("a document that is not JSON", is_wrong=True) from error


def dump(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)
