"""Names of single tokens in log-probabilities: as text, and as the fields of OpenAI's entries."""

from collections.abc import Callable
from typing import Generic, TypeVar

import orjson

Name = TypeVar("Name")

ENTRIES_MAX = 65_536
"""Cached names of each kind; about 10 MiB when full. Making a name costs ten lookups, and few tokens occur among the likely ones."""


class NameTable(dict[int, Name], Generic[Name]):
    """Names by token id, each made on first use.

    A full table is cleared: that needs no order of use, and a working set that does not fit is rare.
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
    """Names of one tokenizer's tokens. The tables are public dictionaries: a lookup takes a tenth of a function call."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self.texts = NameTable(self._text)
        """The token's text. Incomplete characters become U+FFFD."""
        self.fields = NameTable(lambda token_id: self._fields(self.texts[token_id], token_id))
        """`"token":"...","bytes":[...],"logprob":`, the JSON before the number."""
        self.as_ids = NameTable(lambda token_id: f"token_id:{token_id}")
        """vLLM's name of a token that is not decoded."""
        self.fields_as_id = NameTable(lambda token_id: self._fields(self.as_ids[token_id], token_id))
        """`fields` with that name."""

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def _fields(self, name: str, token_id: int) -> bytes:
        data = orjson.dumps(list(self._token_bytes(token_id)))
        return b'"token":%b,"bytes":%b,"logprob":' % (orjson.dumps(name), data)
