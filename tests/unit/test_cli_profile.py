"""Profiles of engines: the fit finds the coefficients that made the points, and files are versioned."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvmesh.cli.profile.command import ProfileCommandSettings, flags_of, main, numbers
from kvmesh.cli.profile.fit import fit_bandwidth, fit_decode, fit_prefill, pairs
from kvmesh.cli.profile.measure import step_time
from kvmesh.cli.profile.page import decode_s, prefill_s
from kvmesh.core import PerformanceProfile
from kvmesh.core.engine_profile import (
    DecodePoint,
    EngineProfile,
    HandoffPoint,
    PrefillPoint,
    read_engine_profile,
    to_text,
)
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import load

BASE_S, TOKEN_S, PAIR_S = 0.02, 2e-4, 3e-8


def prefill_points(noise: float) -> list[PrefillPoint]:
    generator, points = Random(3), []
    for batch in (1, 4):
        for cached, uncached in ((0, 64), (0, 512), (0, 2048), (1024, 1024)):
            point = PrefillPoint(prompt_tokens=cached + uncached, uncached_tokens=uncached, batch=batch, time_s=0.0)
            time_s = min(2, batch) * BASE_S + batch * (TOKEN_S * uncached + PAIR_S * pairs(point))
            points.append(
                PrefillPoint(
                    prompt_tokens=cached + uncached,
                    uncached_tokens=uncached,
                    batch=batch,
                    time_s=time_s * (1 + generator.uniform(-noise, noise)),
                )
            )
    return points


def test_the_fit_finds_the_coefficients():
    """Exactly without noise, and with residuals as large as the noise."""
    fit, residuals, shares_steps = fit_prefill(prefill_points(0.0))
    assert shares_steps
    assert fit.prefill_base_s == pytest.approx(BASE_S)
    assert fit.prefill_s_per_token == pytest.approx(TOKEN_S)
    assert fit.prefill_s_per_token_pair == pytest.approx(PAIR_S)
    assert residuals.largest < 1e-9
    fit, residuals, _ = fit_prefill(prefill_points(0.1))
    assert fit.prefill_s_per_token == pytest.approx(TOKEN_S, rel=0.3)
    assert 0.01 < residuals.rms < residuals.largest < 0.2
    points = [
        DecodePoint(batch=batch, context_tokens=context, step_s=0.01 + 1e-3 * batch + 2e-7 * batch * context)
        for batch in (1, 4, 16)
        for context in (100, 4000)
    ]
    decode, _ = fit_decode(points)
    assert (decode.decode_step_base_s, decode.decode_s_per_request) == pytest.approx((0.01, 1e-3))
    assert decode.decode_s_per_kv_token == pytest.approx(2e-7)


def test_noise_makes_no_fit_too_low():
    """Half of the measurements take three times as long as the other half: the fit has the mean of both, and its error is that of the means."""
    points = [
        DecodePoint(batch=batch, context_tokens=context, step_s=factor * (0.01 + 1e-3 * batch))
        for batch in (1, 4, 16)
        for context in (100, 4000)
        for factor in (0.5, 1.5)
    ]
    fit, residuals = fit_decode(points)
    assert (fit.decode_step_base_s, fit.decode_s_per_request) == pytest.approx((0.01, 1e-3))
    assert residuals.largest < 1e-9


def test_no_coefficient_is_negative():
    """Steps that get faster with the context by chance have no term for it."""
    points = [
        DecodePoint(batch=batch, context_tokens=context, step_s=0.01 + 1e-3 * batch - 1e-7 * context)
        for batch in (1, 4)
        for context in (100, 4000)
    ]
    fit, _ = fit_decode(points)
    assert fit.decode_s_per_kv_token == 0.0
    assert fit.decode_step_base_s > 0


def test_the_bandwidth_is_the_slope():
    """A constant part, such as a decode step, is not part of it; one length alone says nothing."""
    points = [HandoffPoint(prompt_tokens=tokens, time_s=0.03 + tokens * 1000 / 1e9) for tokens in (100, 1000, 4000)]
    assert fit_bandwidth(points, 1000) == pytest.approx(1e9)
    assert fit_bandwidth(points[:1], 1000) is None
    assert fit_bandwidth(points, 0) is None


PROFILE = EngineProfile(
    model="m",
    engine="vllm",
    engine_version="1",
    prefill=tuple(prefill_points(0.0)),
    decode=(DecodePoint(batch=2, context_tokens=1000, step_s=0.01),),
    fit=PerformanceProfile(
        prefill_s_per_token=2e-4, prefill_s_per_token_pair=1e-8, decode_step_base_s=0.01, decode_s_per_request=1e-3
    ),
)


def test_files_are_versioned():
    """A file is read as it was written; another version, or another file, is refused with the field's name."""
    assert read_engine_profile(to_text(PROFILE), field="profile") == PROFILE
    for text in (to_text(PROFILE).replace('"version": 1', '"version": 2'), "{}", "[]", "not JSON", b"\xff"):
        with pytest.raises(InvalidRequestError) as refusal:
            read_engine_profile(text, field="profile")
        assert refusal.value.field == "profile"


def test_flags_for_services():
    """What is known is registered by workers; the simulated engine has the context's part of decode steps in its other terms."""
    worker, simulated = flags_of(PROFILE).splitlines()
    assert worker == (
        "--engine-args='--profile-prefill-s-per-token 0.0002 --profile-prefill-s-per-token-pair 1e-08"
        " --profile-decode-step-base-s 0.01 --profile-decode-s-per-request 0.001'"
    )
    assert "--simulated-profile-base-s 0.01 --simulated-profile-per-prefill-token-s 0.0002" in simulated
    assert "--simulated-profile-per-token-pair-s 1e-08 --simulated-profile-per-prefill-step-s 0 " in simulated
    slow_start = replace(PROFILE, call_s=0.001, fit=replace(PROFILE.fit, prefill_base_s=0.015))
    assert "--simulated-profile-per-prefill-step-s 0.004 " in flags_of(slow_start)
    assert "--simulated-profile-per-prompt-s 0.004 " in flags_of(replace(slow_start, shares_steps=False))


def test_prompts_that_share_no_steps_are_told_apart():
    """Points of an engine on which each prompt costs the fixed time are fitted as such, exactly."""
    points = [
        PrefillPoint(
            prompt_tokens=tokens, uncached_tokens=tokens, batch=batch, time_s=batch * (BASE_S + TOKEN_S * tokens)
        )
        for batch in (1, 4)
        for tokens in (64, 256, 1024)
    ]
    fit, residuals, shares_steps = fit_prefill(points)
    assert not shares_steps
    assert fit.prefill_base_s == pytest.approx(BASE_S)
    assert residuals.largest < 1e-9


def test_settings_are_lists_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They load from flags; what is no number is refused by name; `--show` reads a file."""
    argv = ["--prompt-tokens", "512,128"]
    settings = load(ProfileCommandSettings, argv=argv, environ={}, program="kvmesh profile", description="")
    assert numbers(settings.prompt_tokens, "prompt_tokens") == [128, 512]
    assert numbers(settings.decode_batches, "decode_batches") == [1, 2, 4, 8]
    for wrong in ((), ("0",), ("-1",), ("a",)):
        with pytest.raises(InvalidRequestError) as refusal:
            numbers(wrong, "contexts")
        assert refusal.value.field == "contexts"
    path, html = tmp_path / "profile.json", tmp_path / "profile.html"
    path.write_text(to_text(PROFILE))
    assert main(["--show", str(path), "--html", str(html)]) == 0
    assert "--profile-prefill-s-per-token 0.0002" in capsys.readouterr().out
    text = html.read_text()
    charts = re.findall(r"<svg.*?</svg>", text)
    assert charts
    for svg in charts:
        ET.fromstring(svg)
    assert "measured" in text
    assert not re.search(r"<script|https?://", text)


def test_the_fit_in_plots_is_the_formula_of_the_fit():
    """A point that the model made lies on the line, whether prompts share steps or not."""
    point = PrefillPoint(prompt_tokens=100, uncached_tokens=100, batch=4, time_s=0.0)
    fit = PerformanceProfile(
        prefill_base_s=1.0, prefill_s_per_token=0.5, decode_step_base_s=1.0, decode_s_per_request=0.5
    )
    shared = EngineProfile(model="m", engine="e", engine_version="1", fit=fit)
    assert prefill_s(shared, point) == 2 * 1.0 + 4 * 50.0
    assert prefill_s(replace(shared, shares_steps=False), point) == 4 * 1.0 + 4 * 50.0
    assert decode_s(fit, DecodePoint(batch=3, context_tokens=10, step_s=0.0)) == 2.5


def test_steps_are_timed_where_messages_are_read_late():
    """Steps of 10 ms whose messages are read three at a time; only the time in which both streams run counts."""
    late = [(0.03 * (1 + i // 3), 1) for i in range(30)]
    assert step_time([late, late]) == pytest.approx(0.01, rel=0.1)
    first = [(0.01 * i, 1) for i in range(40)]
    second = [(0.2 + 0.02 * i, 1) for i in range(40)]
    assert step_time([first, first]) == pytest.approx(0.01)
    both = step_time([first, second])
    assert both is not None
    assert 0.01 <= both <= 0.02
    assert step_time([first[:10], [(5.0 + i, 1) for i in range(9)]]) is None
