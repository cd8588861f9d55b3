"""A model's text side, loaded from its directory: tokenizer, chat template, generation defaults, parsers."""

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvmesh.clock import Clock
from kvmesh.core.sampling import MODEL_DEFAULTS
from kvmesh.errors import UnsupportedError
from kvmesh.model_files import TEMPLATE_DIRECTORY
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parsers.select import AUTO, Selection, select
from services.frontend.text.detokenise import Detokeniser, Detokenisers
from services.frontend.text.fast_tokenise import FastTokenizer, Tokenise, load_fast, reference_ids
from services.frontend.text.segment_token_cache import SegmentTokenCache, find_cuts
from services.frontend.text.templates import ChatTemplate
from services.frontend.text.token_names import TokenNames


class TextModel:
    """Converts text to tokens and back, for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        defaults: Mapping[str, float | int] | None = None,
        eos_token_ids: Sequence[int] = (),
        selection: Selection | None = None,
        fast: FastTokenizer | None = None,
        template_source: str = "",
        cached_characters_max: int = 0,
    ) -> None:
        # tokenizer.json may ask for truncation and padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.is_fast = fast is not None
        """Whether fastokens tokenises."""
        self.tokenise: Tokenise = partial(reference_ids, tokenizer) if fast is None else fast.encode
        self._segment_cache = self._make_segment_cache(template_source, cached_characters_max)
        self._detokenisers = Detokenisers(tokenizer)
        self.names = TokenNames(self._detokenisers.token_bytes)
        """Names of single tokens in log-probabilities."""
        self.template = template
        self.defaults = dict(defaults or {})
        """The model's defaults of sampling parameters."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.selection = selection or Selection()
        """Parsers of answers to conversations."""
        self.parser_process: ParserProcess | None = None
        """The process that parses answers, if its parsers are vLLM's; set once it runs."""
        # Builds their tables now, in the thread that loads the model.
        for parses_tools in (False, True):
            self._detokenisers.detokeniser(skip_special_tokens=True, kept=self.marks(parses_tools=parses_tools))

    def _make_segment_cache(self, template_source: str, characters_max: int) -> SegmentTokenCache | None:
        if not characters_max:
            return None
        encode = partial(self.tokenise, adds_special_tokens=False)
        cuts = find_cuts(self._tokenizer, template_source, encode)
        return SegmentTokenCache(encode, cuts, characters_max=characters_max) if cuts else None

    def tokenise_prompt(self, text: str, *, salt: str = "") -> "array[int]":
        """Returns the token ids of a rendered conversation, which contains its special tokens.

        Faster than `tokenise` for segments known with this salt.
        """
        if self._segment_cache is None:
            return self.tokenise(text, adds_special_tokens=False)
        return self._segment_cache.encode(text, salt=salt)

    def detokeniser(self, *, skip_special_tokens: bool, kept: frozenset[str] = frozenset()) -> Detokeniser:
        """Creates a detokeniser for one answer. It never skips the special tokens in `kept`."""
        return self._detokenisers.detokeniser(skip_special_tokens=skip_special_tokens, kept=kept)

    def marks(self, *, parses_tools: bool) -> frozenset[str]:
        """Returns the special tokens that the parsers need in the text; vLLM's parsers may need any."""
        if self.selection.is_remote:
            return self._detokenisers.special_tokens
        return self.selection.marks(parses_tools=parses_tools)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes, possibly a part of a character."""
        return self._detokenisers.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Returns whether answers omit the token by default."""
        return self._detokenisers.is_special(token_id)

    def vocabulary_token(self, token_id: int) -> str:
        """Returns the token's entry in the vocabulary, such as `Ġworld`; empty if there is none."""
        return self._tokenizer.id_to_token(token_id) or ""


def load_text_model(
    directory: Path,
    clock: Clock,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    is_fast: bool = True,
    cached_characters_max: int = 0,
) -> TextModel:
    """Loads the files; takes up to a second. Raises UnsupportedError with the file that is missing or malformed."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(f"{directory} has no tokenizer.json", reason="tokenizer_missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise UnsupportedError(f"{path} cannot be read: {error}", reason="tokenizer_broken") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    fast = load_fast(path, tokenizer) if is_fast else None
    config = _read_json(directory / "tokenizer_config.json")
    sources = _template_sources(directory, config)
    source, tool_source = sources.get("default", ""), sources.get("tool_use", "")
    generation = _read_json(directory / "generation_config.json")
    eos = generation.get("eos_token_id")
    added_tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return TextModel(
        tokenizer,
        template=ChatTemplate(source, _special_tokens(config), clock, tool_source=tool_source) if source else None,
        defaults=_generation_defaults(generation),
        eos_token_ids=eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else [],
        selection=select(
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            template=tool_source or source,
            added_tokens=added_tokens,
        ),
        fast=fast,
        template_source=source + tool_source,
        cached_characters_max=cached_characters_max,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedError(f"{path} is not JSON: {error}", reason="model_files_broken") from error
    return value if isinstance(value, dict) else {}


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns templates by name: `default`, and `tool_use` if conversations with tools have a separate one."""
    found = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template") or ""
    if isinstance(found, list):
        pairs = [(each.get("name"), each.get("template")) for each in found if isinstance(each, dict)]
        sources = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    else:
        sources = {"default": found} if isinstance(found, str) else {}
    files = {path.stem: path for path in (directory / TEMPLATE_DIRECTORY).glob("*.jinja")}
    files["default"] = directory / "chat_template.jinja"
    return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns named tokens: bos_token, eos_token, and those that only some models have, such as image_token."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **config}
    tokens: dict[str, str] = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _generation_defaults(config: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the sampling that the model's authors recommend. An explicit `do_sample: false` means greedy."""
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: config.get(name) for name in MODEL_DEFAULTS}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and value is not True}
