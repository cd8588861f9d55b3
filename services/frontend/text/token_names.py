"""How log-probabilities name single tokens: as text, and as the fields of OpenAI's entries."""

from collections.abc import Callable
from typing import Generic, TypeVar

import orjson

Name = TypeVar("Name")

ENTRIES_MAX = 65_536
"""Names kept of each kind; about 10 MiB when full. Making one costs ten times a look-up, and the tokens that occur among the
likely ones are few."""


class NameTable(dict[int, Name], Generic[Name]):
    """Names by token id, each made when first asked for.

    When there are too many all are forgotten: no order of use has to be kept, and a working set that does not fit is rare.
    """

    def __init__(self, make: Callable[[int], Name], *, entries_max: int = ENTRIES_MAX) -> None:
        super().__init__()
        self._make = make
        self._entries_max = entries_max

    def __missing__(self, token_id: int) -> Name:
        if len(self) >= self._entries_max:
            self.clear()
        name = self[token_id] = self._make(token_id)
        return name


class TokenNames:
    """Names of one tokenizer's tokens. The dictionaries are used as they are: a look-up is a tenth of a function call."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self.texts = NameTable(self._text)
        """The token's text; bytes that are no whole character become U+FFFD."""
        self.fields = NameTable(lambda token_id: self._fields(self.texts[token_id], token_id))
        """`"token":"...","bytes":[...],"logprob":` as JSON: what stands before the number."""
        self.as_ids = NameTable(lambda token_id: f"token_id:{token_id}")
        """vLLM's name of a token that is not decoded."""
        self.fields_as_id = NameTable(lambda token_id: self._fields(self.as_ids[token_id], token_id))
        """`fields` with that name."""

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def _fields(self, name: str, token_id: int) -> bytes:
        data = orjson.dumps(list(self._token_bytes(token_id)))
        return b'"token":%b,"bytes":%b,"logprob":' % (orjson.dumps(name), data)
