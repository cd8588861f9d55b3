"""Sampling, handles, settings and fingerprints of the vLLM adapter, without vLLM."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core import Constraint, ConstraintKind, Generation, SamplingParams
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import compatibility_hash, model_fingerprint
from kvmesh.engines.handles import HandleForm, prompt_hash
from kvmesh.engines.vllm.handles import make_handle, pack, read_handle
from kvmesh.engines.vllm.sampling import Continuable, constraint_arguments, decode_arguments, prefill_arguments
from kvmesh.engines.vllm.settings import VllmSettings, check_cpu_block_size
from kvmesh.errors import InvalidRequestError, KvLostError, UnsupportedError
from kvmesh.settings import SettingsError, load
from kvmesh.worker.settings import HostSettings

FORM = HandleForm(format="vllm/1/nixl-1", compatibility_hash="abc", block_size_tokens=32, kv_bytes_per_block=10)
PARAMETERS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "engine",
    "remote_request_id": "request~1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
}


def generation(emitted: int = 0, **sampling: Any) -> Generation:
    return Generation(model="m", token_ids=[1], emitted_token_ids=range(emitted), sampling=SamplingParams(**sampling))


def test_unset_values_have_the_models_defaults() -> None:
    """A value of the request overrides the default, even if it is 0. A value that neither sets is neutral."""
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    assert decode_arguments(generation(temperature=0.0), defaults) == {
        "temperature": 0.0,
        "top_p": 0.9,
        "max_tokens": 50,
        "min_tokens": 0,
        "ignore_eos": False,
    }
    assert decode_arguments(generation(), {})["temperature"] == 1.0
    assert decode_arguments(generation(), {})["max_tokens"] is None


def test_all_parameters_are_translated() -> None:
    """Each parameter has vLLM's name, and the logit bias is a mapping."""
    arguments = decode_arguments(
        generation(
            top_k=5, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, seed=3,
            logprobs=0, stop_token_ids=(7, 8), logit_bias=((3, 1.5),), ignore_eos=True, max_tokens=9, min_tokens=2,
        ),
        {},
    )  # fmt: skip
    assert arguments == {
        "temperature": 1.0, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "seed": 3, "logprobs": 0, "stop_token_ids": [7, 8], "logit_bias": {3: 1.5},
        "ignore_eos": True, "max_tokens": 9, "min_tokens": 2,
    }  # fmt: skip


def test_limits_count_the_whole_answer() -> None:
    """Limits include emitted tokens, which `continuation.py` counts as output."""
    arguments = decode_arguments(generation(4, max_tokens=10, min_tokens=6), {})
    assert (arguments["max_tokens"], arguments["min_tokens"]) == (10, 6)


@pytest.mark.parametrize(
    ("sampling", "defaults"),
    [
        ({"seed": 1}, {}),
        ({"seed": 1}, {"temperature": 0.5}),
        ({"constraint": Constraint(kind=ConstraintKind.JSON_OBJECT)}, {}),
    ],
)
def test_unsupported_continuations_are_refused(sampling: dict[str, Any], defaults: dict[str, Any]) -> None:
    """An engine that cannot continue seeds or constraints refuses them with emitted tokens, and accepts them without."""
    neither = Continuable(seeds=False, constraints=False)
    with pytest.raises(UnsupportedError):
        decode_arguments(generation(4, **sampling), defaults, neither)
    decode_arguments(generation(0, **sampling), defaults, neither)


def test_a_greedy_continuation_may_have_a_seed() -> None:
    """Greedy sampling draws no random numbers."""
    neither = Continuable(seeds=False, constraints=False)
    decode_arguments(generation(4, seed=1, temperature=0.0), {}, neither)
    decode_arguments(generation(4, seed=1), {"temperature": 0.0}, neither)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text="{}"), {"json": "{}"}),
        (Constraint(kind=ConstraintKind.JSON_OBJECT), {"json_object": True}),
        (Constraint(kind=ConstraintKind.REGEX, text="a+"), {"regex": "a+"}),
        (Constraint(kind=ConstraintKind.GRAMMAR, text="root ::= 1"), {"grammar": "root ::= 1"}),
        (Constraint(kind=ConstraintKind.CHOICE, options=("a", "b")), {"choice": ["a", "b"]}),
        (Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text="{}"), {"structural_tag": "{}"}),
    ],
)
def test_constraints_are_translated(constraint: Constraint, expected: dict[str, Any]) -> None:
    """Every kind of constraint has its name in vLLM."""
    assert constraint_arguments(constraint) == expected


def test_a_prefill_leg_samples_one_greedy_token() -> None:
    """The token is not used, so the sampling parameters of the request do not apply, and it must not be refused."""
    assert prefill_arguments() == {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


def test_a_handle_survives_encoding() -> None:
    """The connector's parameters are unchanged after encoding and decoding, and a handle of another prompt is refused."""
    tokens = list(range(70))
    handle = make_handle(FORM, PARAMETERS, tokens=70, prompt=prompt_hash(0, tokens), lease_s=30)
    assert (handle.handle_id, handle.kv_bytes, handle.tokens, handle.lease_s) == ("request~1", 30, 70, 30)
    assert read_handle(FORM, handle, tokens=70, prompt=prompt_hash(0, tokens)) == PARAMETERS
    with pytest.raises(KvLostError):
        read_handle(FORM, handle, tokens=70, prompt=prompt_hash(1, tokens))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (replace(FORM, format="vllm/0/nixl-0"), "kv_format"),
        (replace(FORM, compatibility_hash="other"), "kv_incompatible"),
        (replace(FORM, block_size_tokens=2 * FORM.block_size_tokens), "kv_payload"),
    ],
)
def test_a_handle_of_another_engine_is_refused(form: HandleForm, reason: str) -> None:
    """Each check works alone. vLLM itself would compute wrong tokens."""
    handle = make_handle(FORM, PARAMETERS, tokens=70, prompt="p", lease_s=30)
    with pytest.raises(KvLostError) as caught:
        read_handle(form, handle, tokens=70, prompt="p")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"[]", b"{}", b"\xff\xfe", b"null", b'{"prompt": "p", "parameters": 3}',
        pack("p", PARAMETERS)[:-1], b"0" * 16 + pack("p", PARAMETERS)[16:], pack("p", PARAMETERS).replace(b"5", b"7"),
        *(pack("p", {**PARAMETERS, **change}) for change in (
            {"remote_block_ids": [[4, 5]]}, {"remote_block_ids": []}, {"remote_block_ids": [5]},
            {"remote_block_ids": [["4", "5", "6"]]}, {"remote_block_ids": [[4, -5, 6]]}, {"remote_block_ids": None},
            {"remote_host": None}, {"remote_port": "x"}, {"remote_port": True}, {"tp_size": 0}, {"pp_size": None},
        )),
    ],
)  # fmt: skip
def test_a_damaged_payload_is_refused(payload: bytes) -> None:
    """A wrong number of blocks, or a wrong type, would raise in vLLM's step and kill the engine."""
    handle = make_handle(FORM, PARAMETERS, tokens=70, prompt="p", lease_s=30)
    with pytest.raises(KvLostError):
        read_handle(FORM, replace(handle, payload=payload), tokens=70, prompt="p")


@pytest.mark.parametrize("change", [{"model": ""}, {"pull_timeout_s": 30.0}, {"pull_timeout_s": 0.0}])
def test_inconsistent_settings_are_refused(change: dict[str, Any]) -> None:
    """The error names the setting."""
    with pytest.raises(InvalidRequestError, match=next(iter(change))):
        VllmSettings(**{"model": "m", **change})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--vllm-tokenizer", "maybe"), ("--vllm-side-channel-port", "70000"), ("--vllm-running-requests-max", "-1"),
        ("--vllm-gpu-memory-fraction", "0"), ("--vllm-kv-cache-bytes", "-1"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(flag: str, value: str) -> None:
    """The error names the flag."""
    with pytest.raises(SettingsError, match=flag):
        load(HostSettings, argv=["--model", "m", flag, value], environ={})


@pytest.mark.parametrize("size", [16, 48, 1])
def test_cpu_blocks_are_multiples_of_32(size: int) -> None:
    """vLLM's own error for it names no setting."""
    with pytest.raises(InvalidRequestError, match="multiple of 32"):
        check_cpu_block_size(size)
    check_cpu_block_size(size * 32)


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    """The same content in another folder is the same model. A model with another byte in its weights or configuration is not."""
    prints = []
    for name, weights, config in (
        ("one", b"\0" * 300_000, "{}"), ("two", b"\0" * 300_000, "{}"), ("three", b"\0" * 299_999 + b"\1", "{}"),
        ("four", b"\0" * 300_000, "{ }"), ("five", b"\0" * 300_001, "{}"),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(config)
        (folder / "README.md").write_text(name)
        prints.append(model_fingerprint(str(folder), "", FileHashes(path=tmp_path / "hashes.json")))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_the_compatibility_hash_is_independent_of_order() -> None:
    """Only the factors and their values matter."""
    assert compatibility_hash({"a": 1, "b": 2}) == compatibility_hash({"b": 2, "a": 1})
    assert compatibility_hash({"a": 1}) != compatibility_hash({"a": 2})
