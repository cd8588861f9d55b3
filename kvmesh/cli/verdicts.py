"""The findings of `kvmesh doctor`. Pure functions from observations to findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.cli.gpu_needs import Need
from kvmesh.cli.nvidia import Driver, NvidiaDevice

DEVICE_TRANSPORTS = ("cuda_ipc", "rc_mlx5", "dc_mlx5", "rc_verbs", "gdr_copy", "efa")
"""UCX transports between GPUs without a copy through host memory."""
LOCAL_TRANSPORTS = ("cma", "knem", "xpmem", "posix", "sysv")
"""UCX transports between processes of one machine."""
THROUGHPUT_RATIO_MIN = 0.7
"""Below this share of `vllm serve`'s tokens per second the finding is a warning."""
THROUGHPUT_RATIO_BROKEN = 0.1
"""Below this share the finding is a failure: the overhead of a mesh is never this large, so something waits for a timeout."""


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found, and what to do about it."""

    check: str
    status: Status
    found: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """0 unless a check failed."""
    return int(any(finding.status is Status.FAILED for finding in findings))


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, status=Status.OK, found=found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check=check, status=Status.WARNING, found=found, advice=advice)


def failed(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check=check, status=Status.FAILED, found=found, advice=advice)


def skipped(check: str, why: str) -> Finding:
    """Returns a check that does not apply, or that depends on a failed one."""
    return Finding(check=check, status=Status.SKIPPED, found=why)


def build_finding(build: str, driver: Driver) -> Finding:
    """Check 1: the installed vLLM fits the machine."""
    name = "engine build"
    if not build:
        advice = "KVMESH_ENGINE_BUILD=cpu make up, or gpu, installs it"
        return warning(name, "no vLLM: simulated engines only", advice)
    if build == "cpu" and driver.devices:
        return warning(
            name,
            f"vLLM's CPU build, and {len(driver.devices)} NVIDIA devices are here",
            "KVMESH_ENGINE_BUILD=gpu make up installs the CUDA build",
        )
    if build == "gpu" and not driver.devices:
        advice = "install the driver, give the container its devices (--gpus all), or KVMESH_ENGINE_BUILD=cpu make up"
        return failed(name, f"vLLM's CUDA build without a device: {driver.problem}", advice)
    return ok(name, f"vLLM's {'CUDA' if build == 'gpu' else 'CPU'} build")


def driver_finding(build: str, driver: Driver, needs: Sequence[Need]) -> Finding:
    """Check 2: the driver answers and is new enough."""
    name = "driver"
    if needs:
        return failed(name, needs[0].problem, needs[0].command)
    if driver.devices:
        cuda = f", CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda[0] else ""
        return ok(name, f"{driver.version}{cuda}, by {driver.source}")
    if build == "gpu":
        return failed(name, driver.problem, "install or repair the NVIDIA driver")
    return skipped(name, why=driver.problem)


def devices_finding(build: str, driver: Driver, visible: Sequence[NvidiaDevice], *, wanted: str | None) -> Finding:
    """Check 3: the devices that engines may use."""
    name = "devices"
    if not driver.devices:
        return skipped(name, why="the driver lists none")
    if not visible:
        return Finding(
            check=name,
            status=Status.FAILED if build == "gpu" else Status.WARNING,
            found=f"CUDA_VISIBLE_DEVICES={wanted} leaves none of {len(driver.devices)}",
            advice="unset it, or name devices that nvidia-smi -L lists",
        )
    kinds = {device.name for device in visible}
    found = f"{len(visible)} of {len(driver.devices)}: " + ", ".join(
        f"{device.index} {device.name} {device.memory_bytes >> 30} GiB" for device in visible
    )
    if len(kinds) > 1:
        advice = "workers of different devices differ in speed; CUDA_VISIBLE_DEVICES can name those of one kind"
        return warning(name, found, advice)
    return ok(name, found)


def compiler_finding(build: str, needs: Sequence[Need]) -> Finding:
    """Check 4: the requirements of Triton."""
    name = "compiler"
    if build != "gpu":
        return skipped(name, why="only kernels on a GPU are compiled when an engine starts")
    if needs:
        return failed(name, "; ".join(need.problem for need in needs), "; ".join(need.command for need in needs))
    return ok(name, "a C compiler and Python.h")


def transport_finding(build: str, transports: Sequence[str], *, is_one_device: bool) -> Finding:
    """Check 7: how KV blocks are transferred. `transports` are the names in UCX's lines of the decode worker's log."""
    name = "UCX transport"
    if not transports:
        advice = "see the decode worker's log; UCX_LOG_LEVEL=info makes UCX log its transports"
        return warning(name, "UCX did not log its transports", advice)
    found = " ".join(transports)
    if build == "gpu" and not any(each in DEVICE_TRANSPORTS for each in transports):
        return Finding(
            check=name,
            status=Status.WARNING if is_one_device else Status.FAILED,
            found=f"{found}: none copies from GPU to GPU, so KV goes through host memory",
            advice="UCX_TLS must allow cuda_copy and cuda_ipc; in containers share IPC and PID namespaces (--ipc=host --pid=host)",
        )
    if build != "gpu" and not any(each in LOCAL_TRANSPORTS for each in transports):
        return warning(
            name,
            f"{found}: no shared memory between workers, so KV goes through sockets",
            "UCX_TLS must allow cma; in containers share the PID namespace and allow ptrace",
        )
    return ok(name, found)


def moved_finding(moved_tokens: float, prompt_tokens: int) -> Finding:
    """Check 8: the prefill worker computed the prompts, and their KV was transferred."""
    name = "KV moved"
    found = f"transferred_tokens_total rose by {moved_tokens:.0f} for {prompt_tokens} prompt tokens"
    if moved_tokens <= 0:
        advice = "the decode worker computed the prompts itself: its log names the pulls that failed; check 7 shows UCX's transports"
        return failed(name, found, advice)
    if moved_tokens < prompt_tokens / 2:
        advice = "prompts that are short or cached at the decode worker do not move; `kvmesh explain` shows why"
        return warning(name, found, advice)
    return ok(name, found)


def exactness_finding(build: str, through_mesh: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> Finding:
    """Check 9: greedy tokens of the mesh equal those of one vLLM engine.

    Transferred blocks are bit-identical. But the decoding engine computes a prompt's last token in another batch than a single engine.
    On a GPU that may change the last bits, and so the choice between two equally likely tokens.
    """
    name = "exactness"
    equal = sum(list(ours) == list(theirs) for ours, theirs in zip(through_mesh, alone, strict=True))
    begun = sum(list(ours[:1]) == list(theirs[:1]) for ours, theirs in zip(through_mesh, alone, strict=True))
    found = f"{equal} of {len(alone)} answers equal those of one engine, token by token"
    if equal == len(alone):
        return ok(name, found)
    if build == "gpu" and begun >= len(alone) - 1 and equal * 2 >= len(alone):
        advice = (
            "rounding can cause this; VLLM_BATCH_INVARIANT=1 for mesh and engine distinguishes it from wrong blocks"
        )
        return warning(name, found, advice)
    advice = "do not serve: blocks arrive damaged. Report this with both logs; --prefill 0 serves without transfers"
    return failed(name, found, advice)


def throughput_finding(mesh_tokens_s: float, serve_tokens_s: float) -> Finding:
    """Check 10: output tokens per second of the mesh, compared with `vllm serve` with one engine and the same requests."""
    name = "throughput"
    ratio = mesh_tokens_s / serve_tokens_s if serve_tokens_s else 0.0
    found = f"{mesh_tokens_s:.0f} tokens/s, `vllm serve` {serve_tokens_s:.0f}: {ratio:.2f} of it"
    if ratio < THROUGHPUT_RATIO_BROKEN:
        advice = "something waits for a timeout: the workers' logs name transfers and requests that timed out; see also check 7"
        return failed(name, found, advice)
    if ratio < THROUGHPUT_RATIO_MIN:
        advice = "prefill and decode share a device or its cores, or transfers are slow (check 7); compare --prefill 0"
        return warning(name, found, advice)
    return ok(name, found)


def transports_in(log: str) -> Sequence[str]:
    """Returns the distinct transports in UCX's `cfg#` lines, such as `rma(cma/memory) am(tcp/lo)`, in order."""
    found: dict[str, None] = {}
    for line in log.splitlines():
        if "cfg#" not in line and "ep_cfg" not in line:
            continue
        for part in line.split("(")[1:]:
            for lane in part.partition(")")[0].split():
                transport, slash, _ = lane.partition("/")
                if slash and transport.replace("_", "").isalnum():
                    found[transport] = None
    return list(found)
