"""Makes the whole answer of a constrained request, in tokens, when the request is submitted.

It depends on prompt, seed and constraint only, so that another engine can continue it.
"""

import json
from array import array
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from kvmesh.core import Constraint, ConstraintKind, Generation
from kvmesh.engines.simulated.documents import refused
from kvmesh.engines.simulated.documents.regex import make_match
from kvmesh.engines.simulated.documents.schema import make_instance
from kvmesh.engines.simulated.documents.tags import make_tagged
from kvmesh.kv.blocks import pack_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class ScriptWriter:
    """Writes answers with the model directory's tokenizer, which is loaded with the first one."""

    def __init__(self, model_dir: str) -> None:
        self._path = Path(model_dir) / FILE if model_dir else None

    @cached_property
    def can_write(self) -> bool:
        """False without a tokenizer."""
        return self._path is not None and self._path.is_file()

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._path))

    def script(self, generation: Generation) -> "array[int]":
        """Returns the answer's tokens without eos. Raises what `make_document` raises."""
        sampling = generation.sampling
        assert sampling.constraint is not None
        seed = 0 if sampling.seed is None or sampling.temperature == 0 else sampling.seed
        prompt = xxh3_64_intdigest(pack_tokens(generation.token_ids))
        text = make_document(sampling.constraint, Random(f"{seed} {prompt}"))
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)


def make_document(constraint: Constraint, random: Random) -> str:
    """Returns a text that matches. The same constraint and the same state of `random` give the same text.

    UnsupportedError for grammars and for unsupported parts of schemas and expressions. InvalidRequestError for a malformed
    constraint.
    """
    try:
        return _made(constraint, random)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        # The constraint is foreign JSON, in which any value may appear anywhere.
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
    try:
        return json.loads(text)
    except ValueError as error:
        raise refused("a document that is not JSON", is_wrong=True) from error


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
