"""Makes the tokenizer: byte-level BPE over a slice of the training text, so that words which the model never saw are copied well.

Pieces of words have no space before them: after a space, in quotes and at the start of a text a word has the same tokens. Only the most
common words of the templates also have a token with their space. With another tokenizer the weights are useless.
"""

import json
import re
from collections import Counter
from itertools import islice

from corpus.mixture import samples
from corpus.words import COMMON, TABLES
from rendering import HERE, load_template, render
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_TOKENS = 2048
SPACED_TOKENS = 500
SAMPLES = 40_000
SEED = 7
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading space, single digits, runs of marks, spaces. Single digits let copied numbers generalise.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_TO_LEARN = SPLIT.replace(r" ?\p{L}+", r"\p{L}+")
SPACE = "Ġ"  # How byte-level BPE writes a space.


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def training_text() -> list[str]:
    template = load_template()
    return [item.text or render(template, item.messages, item.tools) for item in islice(samples(SEED), SAMPLES)]


def _learnt(texts: list[str]) -> Tokenizer:
    """A tokenizer whose words have no space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(SPLIT_TO_LEARN)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS - len(TAGS) - SPACED_TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _spaced_words(texts: list[str], vocabulary: dict[str, int]) -> list[str]:
    """The most common words that are one token and are not themselves in a table of things to copy."""
    tables = {part for table in TABLES if table is not COMMON for entry in table for part in entry.split()} - set(
        COMMON
    )
    counts = Counter(word for text in texts for word in re.findall(r" ([A-Za-z]+)", text))
    return [word for word, _ in counts.most_common() if word in vocabulary and word not in tables][:SPACED_TOKENS]


def make_tokenizer() -> Tokenizer:
    texts = training_text()
    body = json.loads(_learnt(texts).to_str())
    vocabulary, merges = body["model"]["vocab"], body["model"]["merges"]
    for word in _spaced_words(texts, vocabulary):
        vocabulary[SPACE + word] = len(vocabulary)
        merges.append([SPACE, word])
    tokenizer = Tokenizer.from_str(json.dumps(body))
    tokenizer.pre_tokenizer = _pre_tokenizer(SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def main() -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(str(HERE / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
    print("vocabulary:", tokenizer.get_vocab_size())


if __name__ == "__main__":
    main()
