"""Tests of the advisor: it chooses an engine, sizes pools and reports targets that it cannot meet."""

import json
from dataclasses import replace

import pytest

from kvmesh.cli.advise.engine_rules import RULES, choose_engine
from kvmesh.cli.advise.hardware import DEVICES, estimate_speed, model_size, with_profile
from kvmesh.cli.advise.layout import plan_layout
from kvmesh.cli.advise.needs import QUESTIONS, Needs, ask, read_needs
from kvmesh.cli.engine_flags.table import TITLES

FEATURES = {"vllm": ("lora", "seed"), "sglang": ("lora",), "trtllm": ("lora", "image")}


def needs(**changes) -> Needs:
    return replace(read_needs(["--no-questions", "--model", "8B", "--devices", "8"]), **changes)


def speed(wanted: Needs):
    return estimate_speed(model_size(wanted.model, 0), DEVICES[wanted.device], wanted.weight_bytes)


def test_each_engine_has_a_rule_that_can_choose_it():
    """An engine without a rule could never be recommended."""
    assert {rule.engine for rule in RULES} == set(TITLES)


@pytest.mark.parametrize("engine", TITLES)
def test_the_teams_engine_is_chosen(engine):
    assert choose_engine(needs(team_engine=engine, shared_ratio=0.0), FEATURES).engine in {engine, "vllm"}
    assert choose_engine(needs(team_engine="sglang"), FEATURES).engine == "sglang"


def test_an_engine_without_a_needed_feature_is_out():
    choice = choose_engine(needs(features=("seed",), team_engine="sglang"), FEATURES)
    assert choice.engine == "vllm"
    assert ("sglang", "its adapter lacks seed") in choice.removed
    assert choose_engine(needs(features=("video",)), FEATURES).engine == ""


def test_tensorrt_llm_needs_a_gpu():
    assert choose_engine(needs(features=("image",), device="cpu"), FEATURES).engine == ""
    assert choose_engine(needs(features=("image",)), FEATURES).engine == "trtllm"


def test_more_load_needs_more_workers():
    """Pool sizes grow with the load, and the planned load of each pool stays below the limit."""
    sizes = []
    for rate in (1.0, 10.0, 40.0):
        wanted = needs(prompt_tokens=8000, requests_per_s=rate)
        layout = plan_layout(wanted, speed(wanted))
        assert layout.requests_per_s_max >= rate
        sizes.append(layout.prefill + layout.decode)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_one_worker_is_not_split():
    wanted = needs(prompt_tokens=100_000, devices=1)
    assert plan_layout(wanted, speed(wanted)).prefill == 0


def test_targets_that_cannot_be_met_are_named():
    wanted = needs(prompt_tokens=100_000, ttft_s=0.1, itl_s=0.0001, requests_per_s=1000.0)
    text = " ".join(plan_layout(wanted, speed(wanted)).limits)
    for part in ("the load needs", "computing the prompt limits it", "reading the weights limits it"):
        assert part in text


def test_a_model_that_does_not_fit_has_no_worker():
    wanted = needs(model="70B", devices=1)
    assert "needs 4 devices for one worker" in " ".join(plan_layout(wanted, speed(wanted)).limits)


def test_a_profile_replaces_the_data_sheet(tmp_path):
    wanted = needs()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"prefill_s_per_token": 0.5}))
    measured = with_profile(speed(wanted), str(path))
    assert measured.prefill_s_per_token == 0.5 and measured.is_measured
    path.write_text(json.dumps({"speed": 1}))
    with pytest.raises(ValueError, match="not a profile"):
        with_profile(speed(wanted), str(path))


def test_the_size_comes_from_directory_or_name(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 16, "vocab_size": 10}))
    size = model_size(str(tmp_path), 0)
    # Keys and values, 2 layers, 1 head of 4 elements, 2 bytes each.
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 4
    assert size.parameters == 2 * (2 * 8 * 4 * 3 + 3 * 8 * 16) + 2 * 10 * 8
    assert model_size("acme/Model-13B-chat", 0).parameters == 13e9
    assert model_size("acme/Model", 7).parameters == 7e9
    with pytest.raises(ValueError, match="parameters-billions"):
        model_size("acme/4bit-model", 0)


@pytest.mark.parametrize(
    "argv",
    [["--devices", "0"], ["--shared-ratio", "2"], ["--features", "magic"], ["--device", "toaster"], ["--itl-s", "x"]],
)
def test_wrong_values_are_named(argv, capsys):
    with pytest.raises(SystemExit):
        read_needs(["--no-questions", *argv])
    assert argv[0] in capsys.readouterr().err


def test_questions_are_asked_until_the_answer_is_valid(monkeypatch, capsys):
    answers = iter(["many", "0", "3"])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    (devices,) = [each for each in QUESTIONS if each.name == "devices"]
    assert ask(devices) == 3
    assert capsys.readouterr().out.count("\n") == 2
    monkeypatch.setattr("builtins.input", lambda text: "")
    assert ask(devices) == 1
