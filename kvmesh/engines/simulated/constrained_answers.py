"""The whole answer of a constrained request, in tokens, decided when the request comes.

It depends on prompt, seed and constraint only, so that another engine continues it where this one stopped.
"""

from array import array
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kvmesh.core import Generation
from kvmesh.engines.simulated.documents import make_document
from kvmesh.kv.blocks import pack_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class ScriptWriter:
    """Writes answers with the model directory's tokenizer, which is read when the first one is asked for."""

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
        """The answer's tokens without eos. UnsupportedError or InvalidRequestError when there is none for the constraint."""
        sampling = generation.sampling
        assert sampling.constraint is not None
        seed = 0 if sampling.seed is None or sampling.temperature == 0 else sampling.seed
        prompt = xxh3_64_intdigest(pack_tokens(generation.token_ids))
        text = make_document(sampling.constraint, Random(f"{seed} {prompt}"))
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
