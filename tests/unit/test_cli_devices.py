"""Placement of workers on GPUs by `kvmesh up`: a table of expected placements, and its rules on random machines."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cli.devices import GIB, WorkerDevices, WorkerGroup, place_workers, share_memory, topology_order
from kvmesh.cli.gpu_plan import place_on_gpus, weight_bytes
from kvmesh.cli.nvidia import Driver, NvidiaDevice, parse_smi, visible_devices
from kvmesh.cli.plan import MeshInputs, plan_mesh
from kvmesh.cli.up_settings import UpSettings, worker_groups
from kvmesh.engines.sglang.registration import SGLANG, installed_build, rank_devices
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.engines.vllm.registration import VLLM
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import load

SHAPES = {
    "1P+1D": "--prefill 1 --decode 1",
    "2P+2D": "--prefill 2 --decode 2",
    "TP 2": "--prefill 1 --decode 1 --tensor-parallel 2",
    "0P+1D": "--prefill 0 --decode 1",
    "TP 1+2": "--prefill 2 --decode 1 --decode-tensor-parallel 2",
}
NEEDS_2 = "needs 2 devices, and 1 is visible"
TABLE = {
    # For shape and number of devices: the GPUs of each worker. `/2`: two workers share them, and the second one starts last.
    ("1P+1D", 1): "prefill-0 0/2 1st, decode-0 0/2 2nd",
    ("1P+1D", 2): "prefill-0 0, decode-0 1",
    ("1P+1D", 4): "prefill-0 0, decode-0 1",
    ("1P+1D", 8): "prefill-0 0, decode-0 1",
    ("2P+2D", 1): "2 prefill x 1 + 2 decode x 1 = 4 devices are needed, and 1 is visible: 4 workers would share",
    ("2P+2D", 2): "prefill-0 0/2 1st, prefill-1 0/2 2nd, decode-0 1/2 1st, decode-1 1/2 2nd",
    ("2P+2D", 4): "prefill-0 0, prefill-1 1, decode-0 2, decode-1 3",
    ("2P+2D", 8): "prefill-0 0, prefill-1 1, decode-0 2, decode-1 3",
    ("TP 2", 1): NEEDS_2,
    ("TP 2", 2): "prefill-0 0-1/2 1st, decode-0 0-1/2 2nd",
    ("TP 2", 4): "prefill-0 0-1, decode-0 2-3",
    ("TP 2", 8): "prefill-0 0-1, decode-0 2-3",
    ("0P+1D", 1): "decode-0 0",
    ("0P+1D", 2): "decode-0 0",
    ("0P+1D", 4): "decode-0 0",
    ("0P+1D", 8): "decode-0 0",
    ("TP 1+2", 1): NEEDS_2,
    ("TP 1+2", 2): "decode-0 0-1/2 1st, prefill-0 0/2 2nd, prefill-1 1/2 2nd",
    ("TP 1+2", 4): "decode-0 0-1, prefill-0 2, prefill-1 3",
    ("TP 1+2", 8): "decode-0 0-1, prefill-0 2, prefill-1 3",
}


def settings(words: str) -> UpSettings:
    return load(UpSettings, program="kvmesh up", argv=words.split(), environ={})


def described(placements: Sequence[WorkerDevices]) -> str:
    """Formats placements as in `TABLE`."""
    texts = []
    for each in placements:
        text = f"{each.name} {'-'.join(str(position) for position in each.positions)}"
        texts.append(f"{text}/{each.sharers} {('1st', '2nd')[each.turn]}" if each.sharers > 1 else text)
    return ", ".join(texts)


@pytest.mark.parametrize(("shape", "devices"), TABLE)
def test_placements_match_the_table(shape: str, devices: int) -> None:
    """Prefill and decode workers get different devices if there are enough. The ranks of a worker get neighbouring devices."""
    up_settings = settings(SHAPES[shape])
    expected = TABLE[shape, devices]
    if "needed" in expected or "needs" in expected:
        with pytest.raises(InvalidRequestError, match=re.escape(expected)):
            place_workers(range(devices), worker_groups(up_settings), workers_per_device=up_settings.workers_per_gpu)
        return
    placed = place_workers(range(devices), worker_groups(up_settings), workers_per_device=up_settings.workers_per_gpu)
    assert described(placed) == expected


@given(
    devices=st.integers(1, 16),
    prefill=st.integers(0, 6),
    decode=st.integers(1, 6),
    ranks=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    limit=st.integers(1, 4),
)
def test_every_placement_keeps_the_rules(
    devices: int, prefill: int, decode: int, ranks: tuple[int, int], limit: int
) -> None:
    """Each worker is placed once, on as many devices as it has ranks. Devices are shared only if needed, and by no more workers than allowed."""
    groups = [
        WorkerGroup(role="prefill", workers=prefill, devices=ranks[0]),
        WorkerGroup(role="decode", workers=decode, devices=ranks[1]),
    ]
    needed = prefill * ranks[0] + decode * ranks[1]
    try:
        placed = place_workers(range(devices), groups, workers_per_device=limit)
    except InvalidRequestError:
        assert needed > devices or (prefill and ranks[0] > devices)
        return
    assert sorted(each.name for each in placed) == sorted(
        [f"prefill-{number}" for number in range(prefill)] + [f"decode-{number}" for number in range(decode)]
    )
    for each in placed:
        first = each.positions[0]
        assert each.positions == tuple(range(first, first + ranks[each.role == "decode"]))
        others = [other for other in placed if set(other.positions) & set(each.positions)]
        assert max(sum(position in other.positions for other in placed) for position in each.positions) == each.sharers
        assert each.sharers <= limit
        # Workers on the same device start one after the other.
        assert all(other.turn != each.turn for other in others if other is not each)
    if needed <= devices:
        assert all(each.sharers == 1 for each in placed)


def test_workers_that_share_a_device_start_in_turns() -> None:
    """All workers of a turn start together, and the next turn starts when they are ready. Without shared devices there is one turn."""
    driver = Driver(devices=[gpu(number) for number in range(2)], source="NVML")
    for words, turns in (
        ("--prefill 2 --decode 2", [["prefill-0", "decode-0"], ["prefill-1", "decode-1"]]),
        ("--prefill 1 --decode 1", [["prefill-0", "decode-0"]]),
    ):
        up_settings = settings(words)
        places = placed_on(driver, up_settings)
        plan = plan_mesh(MeshInputs(settings=up_settings, registry="http://127.0.0.1:1", places=places))
        assert [[spec.name for spec in turn] for turn in plan.worker_turns] == turns


def gpu(index: int, gibibytes: int = 80) -> NvidiaDevice:
    return NvidiaDevice(index=index, uuid=f"GPU-{index}aaa", name="H100", memory_bytes=gibibytes * GIB)


def placed_on(  # type: ignore[no-untyped-def]
    driver: Driver, up_settings: UpSettings, visible: str | None = None, model: Path = Path("hub/model"), engine=VLLM
):
    return place_on_gpus(
        engine,
        driver,
        worker_groups(up_settings),
        visible=visible,
        has_order=False,
        workers_per_device=up_settings.workers_per_gpu,
        model=model,
    )


def test_the_flags_of_a_worker() -> None:
    """Device ids are positions among the visible devices, which the worker sees too. The user's flags override ours."""
    up_settings = settings("--prefill 1 --decode 1 --tensor-parallel 2 --decode-args=--vllm-gpu-memory-fraction=0.5")
    driver = Driver(devices=[gpu(number) for number in range(8)], source="NVML", version="580.1", cuda=(13, 0))
    places = placed_on(driver, up_settings, visible="4,5,6,7")
    plan = plan_mesh(MeshInputs(settings=up_settings, registry="http://127.0.0.1:1", places=places))
    prefill, decode = plan.workers
    assert flags(prefill.argv, "--vllm-device-ids") == ["0,1"]
    assert flags(decode.argv, "--vllm-device-ids") == ["2,3"]
    assert flags(decode.argv, "--vllm-tensor-parallel-size") == ["2"]
    assert decode.argv[-1] == "--vllm-gpu-memory-fraction=0.5"
    assert decode.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert places.lines[0] == "4 GPUs by NVML (driver 580.1, CUDA 13.0): 4 x H100"
    assert [line.split()[:3] for line in places.lines[2:4]] == [["prefill-0", "4", "5"], ["decode-0", "6", "7"]]


def test_the_flags_of_an_sglang_worker() -> None:
    """SGLang can use GPUs that are not neighbours. Its memory fraction is smaller than vLLM's because it excludes activations."""
    driver = Driver(devices=[gpu(number) for number in range(4)], distances={(0, 2): 1, (1, 3): 1})
    up_settings = settings("--engine sglang --prefill 1 --decode 1 --tensor-parallel 2")
    places = placed_on(driver, up_settings, engine=SGLANG)
    prefill, decode = plan_mesh(MeshInputs(settings=up_settings, registry="http://127.0.0.1:1", places=places)).workers
    assert flags(prefill.argv, "--sglang-device-ids") == ["0,2"]
    assert flags(decode.argv, "--sglang-device-ids") == ["1,3"]
    assert flags(decode.argv, "--sglang-tensor-parallel-size") == ["2"]
    assert flags(decode.argv, "--sglang-gpu-memory-fraction") == ["0.85"]


def test_the_gpus_of_sglangs_ranks() -> None:
    ranks = SglangSettings(model="any", data_parallel_size=2, tensor_parallel_size=2)
    assert [rank_devices(ranks, rank) for rank in (0, 1)] == [("0", "1"), ("2", "3")]
    chosen = replace(ranks, device_ids=("3", "1", "0", "2"))
    assert [rank_devices(chosen, rank) for rank in (0, 1)] == [("3", "1"), ("0", "2")]
    assert replace(ranks, device_ids=("3", "1")).device_of(1) == 1
    with pytest.raises(InvalidRequestError, match="must name 4 GPUs"):
        rank_devices(replace(ranks, device_ids=("0",)), 0)
    with pytest.raises(InvalidRequestError, match="positions"):
        SglangSettings(model="any", device_ids=("GPU-0",))


@pytest.mark.parametrize(("torch", "build"), [("2.13.0+cpu", "cpu"), ("2.13.0", "gpu"), ("", "")])
def test_sglangs_build_is_that_of_its_environments_torch(tmp_path: Path, torch: str, build: str) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    assert installed_build(str(tmp_path / "bin" / "python")) == ""
    for name in ("sglang-0.5.23", *([f"torch-{torch}"] if torch else [])):
        (packages / f"{name}.dist-info").mkdir()
    assert installed_build(str(tmp_path / "bin" / "python")) == build


def flags(argv, name):  # type: ignore[no-untyped-def]
    return [argv[at + 1] for at, word in enumerate(argv) if word == name]


def test_a_worker_alone_on_the_only_device_gets_no_device_ids() -> None:
    """A worker that has the only device to itself needs no device ids. CUDA_VISIBLE_DEVICES may then name a MIG slice, which vLLM cannot
    number.
    """
    places = placed_on(Driver(devices=[gpu(0)]), settings("--prefill 0"))
    assert places.argv == {"decode-0": ("--vllm-log-level", "INFO", "--vllm-gpu-memory-fraction", "0.9")}


def test_the_memory_of_a_shared_device_is_divided_in_bytes(tmp_path: Path) -> None:
    """The share for KV is in bytes if the size of the weights is known. A share that is too small to start is refused."""
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 24)
    (tmp_path / "old.bin").write_bytes(b"x" * 5000)
    assert weight_bytes(tmp_path) == 1024
    assert weight_bytes(tmp_path / "org" / "name") == 0
    shared = WorkerDevices(role="decode", number=0, positions=(0,), sharers=2)
    share = share_memory(shared, device_bytes=80 * GIB, weight_bytes=16 * GIB)
    assert share.fraction == 0.45
    assert 15 * GIB < share.kv_bytes < 17 * GIB
    assert share_memory(shared, device_bytes=80 * GIB, weight_bytes=0).kv_bytes == 0
    alone = WorkerDevices(role="decode", number=0, positions=(0,))
    assert share_memory(alone, device_bytes=80 * GIB, weight_bytes=16 * GIB).kv_bytes == 0
    two = WorkerDevices(role="decode", number=0, positions=(0, 1), sharers=2)
    assert share_memory(two, device_bytes=80 * GIB, weight_bytes=16 * GIB).kv_bytes == share.kv_bytes + 8 * GIB
    with pytest.raises(InvalidRequestError, match=r"decode-0 gets 10.8 GiB .* needs 16.0 GiB for weights"):
        share_memory(shared, device_bytes=24 * GIB, weight_bytes=16 * GIB)


def test_the_topology_order_keeps_close_devices_together() -> None:
    """Pairs of GPUs that NVLink connects are neighbours in the order, whatever their numbers."""
    pairs = {frozenset((0, 2)), frozenset((1, 3))}

    def distance(first: int, second: int) -> int:
        return 1 if frozenset((first, second)) in pairs else 50

    assert list(topology_order(range(4), distance)) == [0, 2, 1, 3]
    assert list(topology_order([3, 1, 0], lambda first, second: 1)) == [3, 1, 0]
    joined = {(first, second): distance(first, second) for first in range(4) for second in range(4)}
    driver = Driver(devices=[gpu(number) for number in range(4)], distances=joined)
    places = placed_on(driver, settings("--tensor-parallel 2"))
    assert flags(places.argv["decode-0"], "--vllm-device-ids") == ["1,3"]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-1a", [1]),
        ("", []),
        ("-1", []),
        ("1,9,0", [1]),
        ("GPU-", []),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(wanted: str | None, indices: list[int]) -> None:
    """CUDA ignores all entries from the first one on that names no device."""
    assert [device.index for device in visible_devices([gpu(number) for number in range(3)], wanted)] == indices


def test_missing_devices_are_refused_with_the_cause() -> None:
    """Without this check, the CUDA build would fail late during its start."""
    with pytest.raises(InvalidRequestError, match="the NVIDIA driver does not answer"):
        placed_on(Driver(problem="the NVIDIA driver does not answer"), settings(""))
    with pytest.raises(InvalidRequestError, match="CUDA_VISIBLE_DEVICES=9 leaves none of 1 devices"):
        placed_on(Driver(devices=[gpu(0)]), settings(""), visible="9")


def test_the_output_of_nvidia_smi_is_parsed() -> None:
    """The output has one line per device. Unknown memory sizes become 0."""
    text = "0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 580.65.06\n3, GPU-2, NVIDIA GB10, [N/A], 580.65.06\nnonsense\n"
    driver = parse_smi(text)
    assert [(device.index, device.memory_bytes >> 20) for device in driver.devices] == [(0, 81559), (3, 0)]
    assert (driver.version, driver.source, driver.problem) == ("580.65.06", "nvidia-smi", "")
    assert parse_smi("No devices were found\n").problem == "nvidia-smi lists no device"
