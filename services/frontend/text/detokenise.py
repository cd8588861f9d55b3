"""Converts token ids to text as they come, in whole characters.

Two methods, chosen once per tokenizer. Byte-level tokenizers (GPT-2, Llama 3, Qwen, the demo model) use tables: most tokens
are whole characters and cost a list lookup. For others a short window is decoded twice, and the difference is the new text.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_HELD_TOKENS_MAX = 8
"""A character has at most four bytes, one per token. One that is incomplete after twice as many tokens is broken."""
WINDOW_EMPTY_TOKENS_MAX = 64
"""Tokens without text that are decoded again with each token that follows. Without a limit a token would cost more, the longer the run."""


class Detokeniser(Protocol):
    """Detokenises one answer. The results of all `push` calls and `flush`, joined, are the decoded text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; may be empty."""
        ...

    def whole(self) -> Sequence[str | None]:
        """Returns by token id the text of the next token, or None if it needs a `push`. Tokens with text need no `push`.

        Valid until the next `push`.
        """
        ...

    def flush(self) -> str:
        """Returns the rest at the end. An incomplete character becomes U+FFFD."""
        ...


class Detokenisers:
    """Creates detokenisers for one tokenizer and holds the tables that they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = _byte_pieces(tokenizer) if _is_byte_level(tokenizer) else None
        self._special = _special_ids(tokenizer)
        self._hidden: dict[tuple[bool, frozenset[str]], frozenset[int]] = {}
        self._tables: dict[frozenset[int], ByteTable] = {}
        # Builds the table now, in the thread that loads the model: a large vocabulary takes a tenth of a second.
        self.detokeniser(skip_special_tokens=True)

    def detokeniser(self, *, skip_special_tokens: bool, kept: frozenset[str] = frozenset()) -> Detokeniser:
        """Creates a detokeniser for one answer. It never skips the special tokens in `kept`."""
        hidden = self._hidden.get((skip_special_tokens, kept))
        if hidden is None:
            hidden = self._hidden[skip_special_tokens, kept] = self._ids_hidden(skip_special_tokens, kept)
        if self._pieces is None:
            return WindowDetokeniser(self._tokenizer, hidden=hidden)
        table = self._tables.get(hidden)
        if table is None:
            table = self._tables[hidden] = ByteTable(self._pieces, hidden)
        return ByteDetokeniser(table)

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of all special tokens."""
        return frozenset(self._special.values())

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is special."""
        return token_id in self._special

    def _ids_hidden(self, skip_special_tokens: bool, kept: frozenset[str]) -> frozenset[int]:
        if not skip_special_tokens:
            return frozenset()
        return frozenset(i for i, text in self._special.items() if text not in kept)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes for log-probabilities. Exact for byte-level tokenizers, else those of its decoded text."""
        if self._pieces is not None:
            return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class ByteTable:
    """Text and bytes by token id. `texts[i]` is None if the token alone is not whole characters; `pieces[i]`: its bytes."""

    def __init__(self, pieces: Sequence[bytes], hidden: frozenset[int]) -> None:
        self.pieces = [b"" if i in hidden else piece for i, piece in enumerate(pieces)]
        self.texts: list[str | None] = [_whole_text(piece) for piece in self.pieces]


class ByteDetokeniser:
    """Byte-level: joined token bytes are UTF-8. Broken sequences become U+FFFD as the Unicode standard recommends."""

    __slots__ = ("_held", "_pieces", "_size", "_texts")

    def __init__(self, table: ByteTable) -> None:
        self._texts = table.texts
        self._pieces = table.pieces
        self._size = len(table.texts)
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokeniser."""
        size, pieces = self._size, self._pieces
        # Models may generate ids beyond the vocabulary, because embedding tables are padded.
        data = self._held + b"".join([pieces[i] for i in token_ids if 0 <= i < size])
        # Not `final`: an incomplete character at the end is not decoded and stays in `_held`.
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def whole(self) -> Sequence[str | None]:
        """See Detokeniser."""
        return () if self._held else self._texts

    def flush(self) -> str:
        """See Detokeniser."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class WindowDetokeniser:
    """Any tokenizer: decodes the last emitted tokens with the new ones and emits the difference."""

    __slots__ = ("_held", "_hidden", "_tokenizer", "_window", "_window_text")

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._window_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokeniser. One token at a time, so that the text does not depend on how tokens were bundled."""
        return "".join([self._step(token_id) for token_id in token_ids if token_id not in self._hidden])

    def whole(self) -> Sequence[str | None]:
        """See Detokeniser. None: what a token adds depends on those before it."""
        return ()

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        # With the window before it, since decoders treat the first token of a text differently: SentencePiece's drop its space.
        text = self._decode(self._window + self._held)
        # The last character is incomplete, or is U+FFFD itself. More tokens show which.
        if text.endswith(REPLACEMENT) and len(self._held) < WINDOW_HELD_TOKENS_MAX:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """See Detokeniser."""
        return self._emit(self._decode(self._window + self._held)) if self._held else ""

    def _emit(self, text: str) -> str:
        piece = text[len(self._window_text) :]
        # Tokens without text stay held, because they may change the text of those that follow.
        if piece:
            self._window, self._held = self._held, []
            self._window_text = self._decode(self._window)
        else:
            del self._held[:-WINDOW_EMPTY_TOKENS_MAX]
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def _special_ids(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _byte_pieces(tokenizer: Tokenizer) -> list[bytes]:
    """Returns each token's bytes, as the byte-level decoder does. A token with characters outside its alphabet is its own text."""
    alphabet = _byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            pieces[token_id] = bytes([alphabet[character] for character in token])
        except KeyError:
            pieces[token_id] = token.encode()
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte for each character of GPT-2's alphabet, which represents every byte by a printable character."""
    # `bytes_to_unicode` in encoder.py of openai/gpt-2.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
