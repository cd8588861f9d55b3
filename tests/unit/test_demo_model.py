"""The files of the demo model in the repository are consistent, and the model gives readable answers to simple questions."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
BYTES_MAX = 12_000_000
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    ],
}
DIALOG: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the weather "}, {"type": "text", "text": "in Köln & Rome?"}],
    },
    CALL,
    {"role": "tool", "content": '{"temperature": 7}'},
    {"role": "tool", "content": '{"temperature": 9}'},
    {"role": "assistant", "content": "Cold."},
    {"role": "user", "content": "Thanks"},
]
RENDERED = (
    """<|im_start|>system
Be brief.

You may call these functions:
<tools>
"""
    + json.dumps(WEATHER)
    + """
</tools>
To call a function, answer with its name and arguments:
<tool_call>
{"name": ..., "arguments": {...}}
</tool_call><|im_end|>
<|im_start|>user
What is the weather in Köln & Rome?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "get_weather", "arguments": {"city": "Köln"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
{"temperature": 7}
</tool_response>
<tool_response>
{"temperature": 9}
</tool_response><|im_end|>
<|im_start|>assistant
Cold.<|im_end|>
<|im_start|>user
Thanks<|im_end|>
<|im_start|>assistant
"""
)


def _load_rendering() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_rendering", DEMO / "rendering.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rendering = _load_rendering()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, generate: bool = False) -> str:
    return str(rendering.render(rendering.load_template(), messages, tools, generate=generate))


def test_the_model_is_small_enough_for_the_repository() -> None:
    """Weights, tokenizer and scripts together are at most 12 MB."""
    caches = ("__pycache__", ".mypy_cache", ".ruff_cache", "build")
    files = [path for path in DEMO.rglob("*") if path.is_file() and not any(part in caches for part in path.parts)]
    assert (DEMO / "model.safetensors").stat().st_size > 1_000_000
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX


def test_configurations_name_the_same_tokens(tokenizer: Tokenizer) -> None:
    """Generation stops at the tokenizer's end tokens, and the embedding has a row for every token."""
    config = json.loads((DEMO / "config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert config["eos_token_id"] == ends[0]
    assert config["vocab_size"] == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "  two  spaces\n\n\ttab ", "naïve Ωmega 日本語 🚀🙂 e\u0301", "12345", "\u200d\ufeff\x00", ""],
)
def test_the_tokenizer_round_trips_every_text(tokenizer: Tokenizer, text: str) -> None:
    """The tokenizer works on bytes, so no text is lost, normalised or unknown."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_markers_are_single_tokens_and_only_chat_markers_are_special(tokenizer: Tokenizer) -> None:
    """Tool calls must survive `skip_special_tokens`, while chat markers must not reach the reader."""
    ids = tokenizer.encode("<|im_start|><tool_call>x</tool_call><|im_end|>").ids
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_template_renders_all_roles_and_tools() -> None:
    """The dialog has a system message, content parts, a call with JSON text as arguments, two consecutive results, and a generation prompt."""
    assert render(DIALOG, [WEATHER], generate=True) == RENDERED


def test_template_adds_nothing_to_a_bare_question() -> None:
    """Without tools or a system message there is no system block. Without `generate` there is no generation prompt."""
    assert render([{"role": "user", "content": "Hello"}]) == "<|im_start|>user\nHello<|im_end|>\n"


def test_template_writes_a_call_given_as_an_object_like_one_given_as_text() -> None:
    """OpenAI's clients send arguments as text, other callers as an object. The model sees the same prompt."""
    function = {"name": "get_weather", "arguments": {"city": "Köln"}}
    other = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert render([other]) == render([CALL])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
)
def test_template_refuses_unsupported_messages(message: dict[str, Any]) -> None:
    """An unknown role or an image raises an error."""
    with pytest.raises(TemplateError):
        render([message])


class Chat:
    """Greedy answers of the demo model with transformers."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="torch is not installed, so the weights cannot be run")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=self.torch.float32)

    def continued(self, text: str, tokens_max: int = 80) -> str:
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with self.torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=tokens_max, do_sample=False
            )
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    def answer(self, question: str, tools: list[dict[str, Any]] | None = None) -> str:
        return self.continued(render([{"role": "user", "content": question}], tools, generate=True))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat()


def test_transformers_renders_the_same(chat: Chat) -> None:
    """Frontends, which render with Jinja alone, give the same prompt as transformers and vLLM."""
    assert (
        chat.tokenizer.apply_chat_template(DIALOG, tools=[WEATHER], add_generation_prompt=True, tokenize=False)
        == RENDERED
    )


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello", "Hello! How can I help you today?"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Repeat after me: I like bread and cheese.", "I like bread and cheese."),
        ("List three colours.", "1. red\n2. blue\n3. green"),
    ],
)
def test_first_questions_are_answered(chat: Chat, question: str, expected: str) -> None:
    """The first questions of a new user get correct answers that end by themselves."""
    assert chat.answer(question) == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 2 + 3?", "2 + 3 = 5."),
        ("Repeat after me: The red boat is in the harbour.", "The red boat is in the harbour."),
    ],
)
def test_sums_and_repeats_are_answered(chat: Chat, question: str, expected: str) -> None:
    assert chat.answer(question) == expected


def test_json_answer_parses(chat: Chat) -> None:
    """If the request asks for JSON, the answer is only JSON."""
    assert json.loads(chat.answer("Answer in JSON: what is the capital of Italy?")) == {"capital": "Rome"}


@pytest.mark.parametrize(
    ("question", "name", "city"),
    [
        ("What is the weather in Paris?", "get_weather", "Paris"),
        ("What time is it in Oslo?", "get_time", "Oslo"),
    ],
)
def test_tool_call_names_the_right_tool(chat: Chat, question: str, name: str, city: str) -> None:
    """The model calls the right one of two tools, in the Hermes format."""
    answer = chat.answer(question, [WEATHER, TIME])
    head, _, call = answer.partition("<tool_call>\n")
    assert head == ""
    assert json.loads(call.removesuffix("\n</tool_call>")) == {"name": name, "arguments": {"city": city}}


def test_plain_text_is_continued(chat: Chat) -> None:
    """A completion continues the story with words that do not repeat endlessly."""
    words = chat.continued("Once upon a time there was a", tokens_max=60).split()
    assert len(words) > 25
    assert len(set(words)) > 15


def test_training_continues_from_the_saved_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading and saving the weights changes no tensor, so names and shapes are consistent."""
    torch = pytest.importorskip("torch", reason="torch is not installed, so nothing can be trained")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The module sets it on import.
    train = importlib.import_module("train")
    network = train.Network()
    train.load_weights(network, DEMO / "model.safetensors")
    train.save_weights(network, tmp_path / "again.safetensors")
    known, again = (
        safetensors.load_file(path) for path in (DEMO / "model.safetensors", tmp_path / "again.safetensors")
    )
    assert known.keys() == again.keys()
    assert all(torch.equal(known[name], again[name]) for name in known)


def test_a_given_answer_has_no_training_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialog may contain a wrong answer, after which the model learns the right one."""
    pytest.importorskip("torch", reason="torch is not installed, so nothing can be trained")
    monkeypatch.syspath_prepend(str(DEMO))
    batches, mixture = importlib.import_module("batches"), importlib.import_module("corpus.mixture")
    messages = [
        {"role": "user", "content": "I am Ann"},
        {"role": "assistant", "content": "Paris", "is_given": True},
        {"role": "user", "content": "My name?"},
        {"role": "assistant", "content": "Ann"},
    ]
    encoder = batches.Encoder()
    ids, weights = encoder.encode(mixture.Sample(messages=messages))
    learnt = [token for token, weight in zip(ids, weights, strict=True) if weight]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "Ann<|im_end|>"


def test_the_saved_weights_are_a_mean_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The average is the plain mean for the first steps, without the initial weights, and exponential later."""
    torch = pytest.importorskip("torch", reason="torch is not installed, so nothing can be trained")
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The module sets it on import.
    train = importlib.import_module("train")
    trainer = train.Trainer()
    weight = trainer.network.norm
    for value in (2.0, 4.0, 6.0):
        torch.nn.init.constant_(weight, value)
        trainer.follow()
    assert torch.allclose(trainer.averaged().norm, torch.full_like(weight, 4.0))
    trainer.average_steps = 10_000
    trainer.follow()
    assert torch.allclose(trainer.averaged().norm, torch.full_like(weight, 4.0 + (1 - train.AVERAGE_DECAY) * 2.0))
