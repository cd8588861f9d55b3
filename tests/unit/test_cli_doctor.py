"""Tests of the findings of `kvmesh doctor`."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvmesh.cli import probe
from kvmesh.cli.gpu_needs import Need, driver_needs
from kvmesh.cli.nvidia import Driver, NvidiaDevice
from kvmesh.cli.verdicts import (
    Finding,
    Status,
    build_finding,
    compiler_finding,
    devices_finding,
    driver_finding,
    exactness_finding,
    exit_status,
    moved_finding,
    skipped,
    throughput_finding,
    transport_finding,
    transports_in,
)

H100 = NvidiaDevice(index=0, uuid="GPU-0", name="H100", memory_bytes=80 << 30)
L4 = NvidiaDevice(index=1, uuid="GPU-1", name="L4", memory_bytes=24 << 30)
HERE = Driver(devices=[H100], version="580.65.06", cuda=(13, 0), source="NVML")
ABSENT = Driver(problem="there is no driver")


@pytest.mark.parametrize(
    ("build", "driver", "status"),
    [
        ("cpu", ABSENT, Status.OK),
        ("cpu", HERE, Status.WARNING),
        ("gpu", HERE, Status.OK),
        ("gpu", ABSENT, Status.FAILED),
        ("", ABSENT, Status.WARNING),
    ],
)
def test_the_build_must_match_the_machine(build: str, driver: Driver, status: Status) -> None:
    """A finding has advice exactly if its status is not OK."""
    finding = build_finding(build, driver)
    assert finding.status is status
    assert bool(finding.advice) is (status is not Status.OK)


def test_the_driver_must_support_the_cuda_version_of_torch() -> None:
    """The check uses the CUDA version that the driver reports, or else the driver's own version. It is skipped for the CPU build."""
    assert driver_needs(HERE) == ()
    for driver in (
        Driver(devices=[H100], version="550.1", cuda=(12, 4)),
        Driver(devices=[H100], version="550.1"),
    ):
        (need,) = driver_needs(driver)
        finding = driver_finding("gpu", driver, [need])
        assert finding.status is Status.FAILED and "580" in finding.found and "apt-get" in finding.advice
    assert driver_needs(Driver(devices=[H100], version="580.1")) == ()
    assert driver_finding("gpu", ABSENT, ()).status is Status.FAILED
    assert driver_finding("cpu", ABSENT, ()).status is Status.SKIPPED
    assert driver_finding("gpu", HERE, ()).status is Status.OK


def test_findings_about_devices_and_the_compiler() -> None:
    """Hidden devices fail the CUDA build. Different GPU models give a warning."""
    assert devices_finding("gpu", HERE, [], wanted="9").status is Status.FAILED
    assert devices_finding("gpu", HERE, [H100, L4], wanted=None).status is Status.WARNING
    assert devices_finding("gpu", HERE, [H100], wanted=None).status is Status.OK
    assert devices_finding("cpu", ABSENT, [], wanted=None).status is Status.SKIPPED
    assert compiler_finding("cpu", [Need(problem="no gcc")]).status is Status.SKIPPED
    assert compiler_finding("gpu", [Need(problem="no gcc")]).status is Status.FAILED
    assert compiler_finding("gpu", []).status is Status.OK


UCX = """
[1.2] [vm:7:0] ucp_worker.c:1997 UCX  INFO    a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[1.3] [vm:7:0] ucp_worker.c:1997 UCX  INFO    b intra-node cfg#1 rma(cuda_ipc/cuda)  am(tcp/eth0 cma/memory)  ka(tcp/eth0)
[1.4] [vm:7:0] parser.c:2587 UCX  INFO  UCX_* env variable: UCX_LOG_LEVEL=info (x/y)
"""


def test_transports_are_parsed_from_ucxs_log() -> None:
    """Each transport is listed once, in the order of the log. Without a transport between GPUs, the CUDA build fails, or warns on one GPU."""
    assert transports_in(UCX) == ["tcp", "cma", "cuda_ipc"]
    assert transport_finding("gpu", ["cuda_ipc", "tcp"], is_one_device=False).status is Status.OK
    assert transport_finding("gpu", ["tcp", "cma"], is_one_device=False).status is Status.FAILED
    assert transport_finding("gpu", ["tcp", "cma"], is_one_device=True).status is Status.WARNING
    assert transport_finding("cpu", ["tcp", "cma"], is_one_device=False).status is Status.OK
    assert transport_finding("cpu", ["tcp"], is_one_device=False).status is Status.WARNING
    assert transport_finding("cpu", [], is_one_device=False).status is Status.WARNING


def test_the_number_of_moved_blocks() -> None:
    """The check fails if no block was moved, because the decode worker then computed every prompt itself."""
    assert moved_finding(0, 100).status is Status.FAILED
    assert moved_finding(40, 100).status is Status.WARNING
    assert moved_finding(100, 100).status is Status.OK


def test_the_outputs_of_the_mesh_must_match_one_engines() -> None:
    """On a CPU all outputs must match. On a GPU, rounding may change later tokens of a few outputs, but not most outputs."""
    right = [[1, 2], [3, 4], [5, 6], [7, 8]]
    late = [[1, 2], [3, 9], [5, 6], [7, 8]]
    wrong = [[9, 9], [9, 9], [9, 9], [7, 8]]
    assert exactness_finding("cpu", right, right).status is Status.OK
    assert exactness_finding("cpu", late, right).status is Status.FAILED
    assert exactness_finding("gpu", late, right).status is Status.WARNING
    assert exactness_finding("gpu", wrong, right).status is Status.FAILED


def test_throughput_and_the_exit_status() -> None:
    """Low throughput gives a warning, and a tenth of the reference a failure. Both figures are shown. Only failures change the exit status."""
    assert throughput_finding(80, 100).status is Status.OK
    assert throughput_finding(50, 100).status is Status.WARNING
    assert throughput_finding(9, 100).status is Status.FAILED
    assert throughput_finding(80, 100).found == "80 tokens/s, `vllm serve` 100: 0.80 of it"
    warning = throughput_finding(50, 100)
    assert exit_status([skipped("x", "y"), warning]) == 0
    assert exit_status([warning, Finding(check="x", status=Status.FAILED, found="y")]) == 1


@pytest.mark.parametrize(("limit_s", "requests_sent"), [(3600.0, 4 + 10), (0.0, 4 + 4)])
async def test_the_throughput_measurement_stops_at_its_limit(limit_s: float, requests_sent: int) -> None:
    """After the time limit no further request is sent, but each concurrent client sends at least one. No prompt is sent twice."""
    prompts = []

    async def complete(request: web.Request) -> web.Response:
        prompts.append((await request.json())["prompt"])
        return web.json_response({"usage": {"completion_tokens": 5}})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server:
        speed = await probe.tokens_per_s(
            str(server.make_url("")).rstrip("/"),
            "m",
            requests=10,
            concurrency=4,
            prompt_words=5,
            tokens=5,
            first=0,
            limit_s=limit_s,
        )
    assert speed > 0
    assert len(prompts) == len(set(prompts)) == requests_sent
