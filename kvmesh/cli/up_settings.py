"""Settings of `kvmesh up`."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvmesh.cli.devices import WorkerGroup
from kvmesh.engines.registration import EngineRegistration
from kvmesh.engines.registry import ENGINES
from kvmesh.network.settings import NetworkSettings
from kvmesh.settings import setting

DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"


@dataclass(frozen=True, kw_only=True)
class UpSettings(NetworkSettings):
    """What to start."""

    engine: str = setting(
        "", "engine of all workers; empty: vllm if it is installed, otherwise simulated", choices=("", *ENGINES)
    )
    model: str = setting(str(DEMO_MODEL), "model directory in Hugging Face layout")
    served_name: str = setting("", "model name in requests; empty: the directory's name")
    prefill: int = setting(1, "prefill workers; 0: decode workers compute prompts themselves", min=0, max=64)
    decode: int = setting(1, "decode workers", min=1, max=64)
    tensor_parallel: int = setting(1, "ranks of each worker, each on its own GPU", min=1, max=64)
    prefill_tensor_parallel: int = setting(
        0, "GPUs of each prefill worker; 0: the value of tensor_parallel", min=0, max=64
    )
    decode_tensor_parallel: int = setting(
        0, "GPUs of each decode worker; 0: the value of tensor_parallel", min=0, max=64
    )
    workers_per_gpu: int = setting(
        2, "most workers that share a GPU if there are too few GPUs; they start one after the other", min=1, max=64
    )
    routers: int = setting(1, "routers, all active; with two, one may die and no request fails", min=1, max=16)
    frontend_processes: int = setting(1, "frontend processes that share the HTTP port", min=1, max=64)
    gateway: bool = setting(
        True,
        "one process for frontend and router where there is one of each: asks need no network. No: a process for each",
    )
    fork: bool = setting(
        True,
        "services are forks of one process that has imported them, and share that memory (Linux, simulated engines)."
        " No: each starts by itself",
    )
    planner: bool = setting(True, "a planner, which observes the pools by scraping them")
    plan: bool = setting(
        False,
        "the planner acts: it moves workers between the pools, and has workers started and stopped, within the targets of"
        " --planner-args",
    )
    host: str = setting("", "address that the frontend's HTTP API listens on; empty: the value of `address`")
    port: int = setting(8000, "port of the frontend's HTTP API; 0: any free one", min=0, max=65535)
    grpc_port: int = setting(0, "port of the frontend's gRPC API; 0: any free one", min=0, max=65535)
    join: str = setting(
        "",
        "mesh that these workers join: the name of one that runs here, or the address of its registry and its `credentials`. Only"
        " workers start; their engine may be another one",
    )
    consul: str = setting("", "address of a Consul agent; empty: an embedded registry")
    discovery_token: str = setting("", "ACL token for the Consul agent, of `kvmesh up` and its services", secret=True)
    discovery_token_file: str = setting("", "file with this token")
    mesh_tls: bool = setting(
        True,
        "mutual TLS between services, with certificates of an authority of this mesh. No: plain text, for measurements",
    )
    credentials: str = setting(
        "",
        "folder of `kvmesh credentials`, for a mesh on several machines: its token, secret and certificates. Empty: new ones",
    )
    policy: str = setting(
        "kv",
        "placement policy: one of the router's, or of an installed package (docs/understand/routing-cost.md)",
    )
    engine_args: str = setting(
        "", "more flags for every worker, as one string: --engine-args='--simulated-time-factor 0'"
    )
    prefill_args: str = setting("", "more flags for prefill workers, as one string; they override --engine-args")
    decode_args: str = setting(
        "", "more flags for decode workers, as one string: --decode-args='--vllm-running-requests-max 256'"
    )
    router_args: str = setting(
        "", "more flags for every router, as one string: --router-args='--cost-temperature 0.01'"
    )
    frontend_args: str = setting("", "more flags for the frontend, as one string: --frontend-args=--http-allows-pins")
    planner_args: str = setting(
        "", "more flags for the planner, as one string: --planner-args='--targets-ttft-s 0.5 --targets-itl-s 0.05'"
    )
    log_level: str = setting("info", "log level of all services", choices=("debug", "info", "warning", "error"))
    name: str = setting("", "name of the mesh, for --mesh of other commands; empty: DIRECTORY-PORT")
    run_dir: str = setting("", "directory of the services' logs; empty: run/NAME")
    ready_timeout_s: float = setting(
        600.0,
        "longest time without a new line of progress while the mesh starts; a download or a compilation can take minutes",
        min=1.0,
    )
    restarts_max: int = setting(
        5, "restarts in a row of a process that dies, before kvmesh gives up on it. 0: no restarts", min=0, max=100_000
    )
    restart_window_s: float = setting(
        300.0, "after a process has run this long, its restarts are counted from 0 again", min=0.1
    )
    stop_timeout_s: float = setting(20.0, "longest wait for each group of services to stop", min=0.1)
    greeting: str = setting("Hello! Who are you?", "question that is sent once the mesh is ready; empty: none")
    once: bool = setting(False, "stop after the greeting is answered")
    api_key: str = setting("", "API key for the greeting, if the frontend requires one", secret=True)

    @property
    def registration(self) -> EngineRegistration[Any]:
        return ENGINES[self.engine or default_engine()]

    @property
    def model_path(self) -> Path:
        """The absolute path of a directory; otherwise a name that the engine resolves."""
        path = Path(self.model).expanduser()
        return path.absolute() if path.exists() else path

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir).resolve()


def default_engine() -> str:
    """vLLM where it is installed."""
    return "simulated" if importlib.util.find_spec("vllm") is None else "vllm"


def adapt_to_packages(settings: UpSettings) -> tuple[UpSettings, Sequence[str]]:
    """Returns the settings as the installed packages allow, and lines for people about what changed."""
    lines = []
    if not settings.engine and default_engine() == "simulated":
        lines.append("vLLM is not installed, so the simulated engine serves")
    if settings.registration.name == "simulated" and importlib.util.find_spec("nixl") is None:
        flags = f"--simulated-kv-transport none {settings.engine_args}".strip()
        settings = replace(settings, prefill=0, engine_args=flags)
        lines.append(
            "NIXL is not installed: there are no prefill workers, and decode workers compute prompts themselves"
        )
    return settings, lines


def worker_groups(settings: UpSettings) -> Sequence[WorkerGroup]:
    """Returns the workers of each role, with their GPUs."""
    tensor_parallel = settings.tensor_parallel
    return (
        WorkerGroup(
            role="prefill", workers=settings.prefill, devices=settings.prefill_tensor_parallel or tensor_parallel
        ),
        WorkerGroup(role="decode", workers=settings.decode, devices=settings.decode_tensor_parallel or tensor_parallel),
    )


def model_problem(model: str) -> str:
    """Returns why a model cannot be served, as far as this process can check. The engine checks names that are not paths."""
    path = Path(model).expanduser()
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        verb = "is" if len(missing) == 1 else "are"
        return f"{path} is no model directory: {' and '.join(missing)} {verb} missing" if missing else ""
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return f"the model directory {path} does not exist"
    return ""
