"""Makes the tokenizer: byte-level BPE over a slice of the training text.

It was run once, on an earlier state of the text, and is frozen: with another tokenizer the weights are useless.
"""

import json
from collections.abc import Iterator
from itertools import islice

from corpus.mixture import samples
from rendering import HERE, load_template, render
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_TOKENS = 3072
SAMPLES = 30_000
SEED = 7
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading space, single digits, runs of marks, spaces. Single digits let copied numbers generalise.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def training_text() -> Iterator[str]:
    template = load_template()
    for item in islice(samples(SEED), SAMPLES):
        yield item.text or render(template, item.messages, item.tools)


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False, special=False) for tag in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS - len(tags),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_tokens(tags)
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
