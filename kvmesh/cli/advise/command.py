"""`kvmesh advise`: proposes an engine, a layout and the command that starts it."""

import shlex
import sys
from collections.abc import Iterator, Sequence

from kvmesh.cli.advise.engine_rules import EngineChoice, choose_engine
from kvmesh.cli.advise.hardware import DEVICES, ModelSize, WorkerSpeed, estimate_speed, model_size, with_profile
from kvmesh.cli.advise.layout import Layout, plan_layout
from kvmesh.cli.advise.needs import Needs, read_needs
from kvmesh.cli.engine_flags.table import TITLES


def main(argv: Sequence[str]) -> int:
    """Prints the advice. The status is 1 if no engine has the features, or a target or the load cannot be met."""
    needs = read_needs(argv)
    try:
        size = model_size(needs.model, needs.parameters_billions)
        speed = estimate_speed(size, DEVICES[needs.device], needs.weight_bytes)
        if needs.profile:
            speed = with_profile(speed, needs.profile)
    except (ValueError, OSError, KeyError) as error:
        print(f"kvmesh advise: {error}", file=sys.stderr)
        return 2
    choice = choose_engine(needs)
    layout = plan_layout(needs, speed)
    print("\n".join(lines(needs, size, speed, choice=choice, layout=layout)))
    return 1 if layout.limits or not choice.engine else 0


def lines(needs: Needs, size: ModelSize, speed: WorkerSpeed, *, choice: EngineChoice, layout: Layout) -> Iterator[str]:
    """The advice: what, how, why, and what would change it."""
    yield f"engine   {TITLES[choice.engine] if choice.engine else 'none has all the features'}"
    yield f"layout   {_layout_text(layout, speed)}"
    if choice.engine:
        yield f"command  {up_command(needs, choice.engine, speed, layout=layout)}"
    yield f"expected {_expected(needs, size, speed, layout=layout)}"
    yield from _section("cannot be met:", layout.limits)
    yield from _section("why:", [*choice.reasons, *layout.reasons])
    yield from _section("not chosen:", [f"{TITLES[engine]}: {reason}" for engine, reason in choice.removed])
    yield from _section("what would change this:", [*choice.changes, *layout.changes])


def up_command(needs: Needs, engine: str, speed: WorkerSpeed, *, layout: Layout) -> str:
    """Returns the command for one machine."""
    words = ["kvmesh", "up", "--engine", engine, "--model", needs.model]
    words += ["--prefill", str(layout.prefill), "--decode", str(layout.decode)]
    if speed.ranks > 1:
        words += ["--tensor-parallel", str(speed.ranks)]
    return shlex.join(words)


def _layout_text(layout: Layout, speed: WorkerSpeed) -> str:
    each = f"of {speed.ranks} device{'s' if speed.ranks > 1 else ''} each"
    if not layout.prefill:
        return f"not split: {layout.decode} worker{'s' if layout.decode > 1 else ''} {each}"
    return f"split: {layout.prefill} prefill and {layout.decode} decode {each}"


def _expected(needs: Needs, size: ModelSize, speed: WorkerSpeed, *, layout: Layout) -> str:
    source = "the profile" if speed.is_measured else f"data sheets of {DEVICES[needs.device].title}"
    kv = ", KV per token estimated" if size.is_estimated and not speed.is_measured else ""
    return (
        f"first token {layout.ttft_s:.3g} s, {layout.itl_s:.3g} s between tokens, up to"
        f" {layout.requests_per_s_max:.3g} requests/s (from {source}{kv}; measure before you rely on it)"
    )


def _section(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield from ("", title)
        yield from (f"  {text}" for text in texts)
