"""Engine profiles: the fit recovers the coefficients behind the measurements, and profile files have a version."""

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
    """Without noise the fit is exact. With noise the residuals are as large as the noise."""
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


def test_noise_does_not_bias_the_fit():
    """Half of the measurements take three times as long as the others. The fit has the mean of both, and its error refers to the means."""
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
    """If steps happen to get faster with a longer context, the fit has no term for the context."""
    points = [
        DecodePoint(batch=batch, context_tokens=context, step_s=0.01 + 1e-3 * batch - 1e-7 * context)
        for batch in (1, 4)
        for context in (100, 4000)
    ]
    fit, _ = fit_decode(points)
    assert fit.decode_s_per_kv_token == 0.0
    assert fit.decode_step_base_s > 0


def test_the_bandwidth_is_the_slope_of_the_handoff_times():
    """A constant part, such as a decode step, does not count. One prompt length alone gives no bandwidth."""
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
    """Reading a written file returns the same profile. A file of another version or format is refused with the name of the field."""
    assert read_engine_profile(to_text(PROFILE), field="profile") == PROFILE
    for text in (to_text(PROFILE).replace('"version": 1', '"version": 2'), "{}", "[]", "not JSON", b"\xff"):
        with pytest.raises(InvalidRequestError) as refusal:
            read_engine_profile(text, field="profile")
        assert refusal.value.field == "profile"


def test_profiles_give_flags_for_services():
    """Workers register the measured values. The simulated engine's flags have no term for the context of decode steps."""
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


def test_engines_that_do_not_share_steps_are_detected():
    """If each prompt costs the fixed time, the fit detects that the engine does not share steps, and is exact."""
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
    """Values that are not positive numbers are refused by name. `--show` prints the flags of a profile file and writes its plots."""
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


def test_plots_use_the_formula_of_the_fit():
    """A point that the fitted formula generates lies on the line, whether or not prompts share steps."""
    point = PrefillPoint(prompt_tokens=100, uncached_tokens=100, batch=4, time_s=0.0)
    fit = PerformanceProfile(
        prefill_base_s=1.0, prefill_s_per_token=0.5, decode_step_base_s=1.0, decode_s_per_request=0.5
    )
    shared = EngineProfile(model="m", engine="e", engine_version="1", fit=fit)
    assert prefill_s(shared, point) == 2 * 1.0 + 4 * 50.0
    assert prefill_s(replace(shared, shares_steps=False), point) == 4 * 1.0 + 4 * 50.0
    assert decode_s(fit, DecodePoint(batch=3, context_tokens=10, step_s=0.0)) == 2.5


def test_step_times_are_right_if_messages_are_read_late():
    """Steps take 10 ms, and their messages are read three at a time. Only the time in which both streams run counts."""
    late = [(0.03 * (1 + i // 3), 1) for i in range(30)]
    assert step_time([late, late]) == pytest.approx(0.01, rel=0.1)
    first = [(0.01 * i, 1) for i in range(40)]
    second = [(0.2 + 0.02 * i, 1) for i in range(40)]
    assert step_time([first, first]) == pytest.approx(0.01)
    both = step_time([first, second])
    assert both is not None
    assert 0.01 <= both <= 0.02
    assert step_time([first[:10], [(5.0 + i, 1) for i in range(9)]]) is None
