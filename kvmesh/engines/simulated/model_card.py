"""The model card of a simulated engine: names and sizes from a Hugging Face directory, without loading a model."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.core import ModelCard
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import InvalidRequestError, NotFoundError

CONTEXT_TOKENS_DEFAULT = 8192
VOCABULARY_DEFAULT = 32000
EOS_DEFAULT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Generated ids: `first_id` to `first_id + span - 1`, without eos."""

    first_id: int
    span: int


def read_card(settings: SimulatedSettings) -> tuple[ModelCard, TokenRange]:
    """Returns the card and the ids to generate. NotFoundError when the directory has no config.json."""
    config: dict[str, Any] = {}
    special: set[int] = set()
    if settings.model_dir:
        folder = Path(settings.model_dir)
        if not (folder / "config.json").is_file():
            raise NotFoundError(f"{folder} has no config.json", field="model_dir", reason="model_not_found")
        config = _read(folder / "config.json")
        generation = _read(folder / "generation_config.json")
        config["eos_token_id"] = generation.get("eos_token_id", config.get("eos_token_id"))
        special = {int(token["id"]) for token in _read(folder / "tokenizer.json").get("added_tokens", ())}
    eos = (settings.eos_token_id,) if settings.eos_token_id >= 0 else _ids(config.get("eos_token_id"))
    card = ModelCard(
        name=settings.model,
        source=settings.model_dir or settings.model,
        revision=settings.revision,
        context_tokens_max=_context(settings, config),
        vocabulary_size=settings.vocabulary_size or int(config.get("vocab_size", VOCABULARY_DEFAULT)),
        eos_token_ids=eos or (EOS_DEFAULT,),
    )
    return card, _range(card, special)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(int(item) for item in value)
    return (int(value),) if isinstance(value, int) else ()


def _context(settings: SimulatedSettings, config: dict[str, Any]) -> int:
    limit = settings.context_tokens_max or int(config.get("max_position_embeddings", CONTEXT_TOKENS_DEFAULT))
    return min(limit, settings.kv_blocks * settings.block_size_tokens)


def _range(card: ModelCard, special: set[int]) -> TokenRange:
    first, span = widest_gap({*special, *card.eos_token_ids}, card.vocabulary_size)
    if span < 1:
        raise InvalidRequestError("the vocabulary has only special tokens", field="vocabulary_size")
    return TokenRange(first_id=first, span=span)


def widest_gap(taken: Iterable[int], size: int) -> tuple[int, int]:
    """Start and length of the longest run of free ids below `size`."""
    best, start = (0, 0), 0
    for edge in [*sorted(taken), size]:
        edge = min(edge, size)
        if edge - start > best[1]:
            best = (start, edge - start)
        start = max(start, edge + 1)
    return best
