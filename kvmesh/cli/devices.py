"""Assigns devices and shares of their memory to workers. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.errors import InvalidRequestError

MEMORY_FRACTION = 0.9
"""Share of a device's memory for all its engines together: vLLM's default for one engine."""
RESERVE_BYTES = 1 << 30
RESERVE_FRACTION = 0.08
"""Memory for CUDA's context, activations and CUDA graphs, for engines whose memory is not profiled.

A generous estimate: a smaller KV cache does no harm, but a full device is a failure.
"""
KV_BYTES_MIN = 256 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Equal workers of one role, each on `devices` devices (its tensor-parallel ranks)."""

    role: str
    workers: int
    devices: int = 1

    @property
    def text(self) -> str:
        return f"{self.workers} {self.role} x {self.devices}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevices:
    """One worker's devices. `positions` are indices of visible devices, one for each rank.

    `sharers` is the largest number of workers on one of its devices. `turn` is the number of them that start before this one.
    """

    role: str
    number: int
    positions: tuple[int, ...]
    sharers: int = 1
    turn: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


def topology_order(positions: Sequence[int], distance: Callable[[int, int], int]) -> Sequence[int]:
    """Sorts devices so that each one is the nearest to the one before it. Ties keep the given order."""
    left, order = list(positions), list[int]()
    while left:
        last = order[-1] if order else None
        nearest = left[0] if last is None else min(left, key=lambda position: distance(last, position))
        left.remove(nearest)
        order.append(nearest)
    return order


def place_workers(
    order: Sequence[int], groups: Sequence[WorkerGroup], *, workers_per_device: int
) -> Sequence[WorkerDevices]:
    """Assigns devices of `order` to each worker.

    Ranks of one worker are adjacent in `order`. Workers share devices only if there are fewer devices than ranks. Roles share devices only
    if that reduces the largest number of workers on a device. InvalidRequestError, with the arithmetic, when more than
    `workers_per_device` would share one.
    """
    groups = [group for group in groups if group.workers]
    _check_sizes(len(order), groups)
    # Larger groups first, so that they start at multiples of their size: links connect pairs and quads.
    groups = sorted(groups, key=lambda group: -group.devices)
    apart, together = _place_separately(len(order), groups), _place_together(len(order), groups)
    blocks = together if apart is None or _largest_load(together) < _largest_load(apart) else apart
    if _largest_load(blocks) > workers_per_device:
        raise InvalidRequestError(
            _refusal(len(order), groups, most=_largest_load(blocks), allowed=workers_per_device), field="gpus"
        )
    return _placements(order, groups, blocks)


Blocks = Sequence[tuple[WorkerGroup, Sequence[int]]]
"""For each worker its group and its indices in the order of devices."""


def _check_sizes(devices: int, groups: Sequence[WorkerGroup]) -> None:
    for group in groups:
        if group.devices > devices:
            raise InvalidRequestError(
                f"a {group.role} worker with tensor parallel {group.devices} needs {group.devices} devices, and"
                f" {devices} {'is' if devices == 1 else 'are'} visible",
                field="tensor_parallel",
            )


def _place_separately(devices: int, groups: Sequence[WorkerGroup]) -> Blocks | None:
    """Each role on separate devices; None when there are too few devices."""
    if len(groups) < 2:
        return _spread(range(devices), groups[0]) if groups else ()
    first, second = groups
    splits = range(first.devices, devices - second.devices + 1, first.devices)
    options = [[*_spread(range(split), first), *_spread(range(split, devices), second)] for split in splits]
    return min(options, key=lambda blocks: (_largest_load(blocks), _sum_of_squares(blocks)), default=None)


def _spread(devices: Sequence[int], group: WorkerGroup) -> Blocks:
    """Spreads the workers of a group over its devices as evenly as possible."""
    starts = range(0, len(devices) - group.devices + 1, group.devices)
    places = [devices[start : start + group.devices] for start in starts]
    return [(group, places[number % len(places)]) for number in range(group.workers)]


def _place_together(devices: int, groups: Sequence[WorkerGroup]) -> Blocks:
    """Places each worker on the devices with the fewest workers of any role."""
    loads = [0] * devices
    blocks = []
    for group in groups:
        for _ in range(group.workers):
            starts = range(0, devices - group.devices + 1, group.devices)
            place = min(
                (range(start, start + group.devices) for start in starts),
                key=lambda places: max(loads[each] for each in places),
            )
            for each in place:
                loads[each] += 1
            blocks.append((group, place))
    return blocks


def _loads(blocks: Blocks) -> Mapping[int, int]:
    loads: dict[int, int] = {}
    for _, places in blocks:
        for each in places:
            loads[each] = loads.get(each, 0) + 1
    return loads


def _largest_load(blocks: Blocks) -> int:
    return max(_loads(blocks).values(), default=0)


def _sum_of_squares(blocks: Blocks) -> int:
    return sum(load * load for load in _loads(blocks).values())


def _refusal(devices: int, groups: Sequence[WorkerGroup], *, most: int, allowed: int) -> str:
    needed = sum(group.workers * group.devices for group in groups)
    terms = " + ".join(group.text for group in sorted(groups, key=lambda group: group.role, reverse=True))
    visible = f"{devices} {'is' if devices == 1 else 'are'} visible"
    return (
        f"{terms} = {needed} devices are needed, and {visible}: {most} workers would share a device, and at most {allowed}"
        " may. Ask for fewer workers, or allow more with --workers-per-gpu"
    )


def _placements(order: Sequence[int], groups: Sequence[WorkerGroup], blocks: Blocks) -> Sequence[WorkerDevices]:
    loads = _loads(blocks)
    begun: dict[int, int] = {}
    numbers = dict.fromkeys((group.role for group in groups), 0)
    placements = []
    for group, places in blocks:
        turn = max(begun.get(each, 0) for each in places)
        begun.update(dict.fromkeys(places, turn + 1))
        placements.append(
            WorkerDevices(
                role=group.role,
                number=numbers[group.role],
                positions=tuple(order[each] for each in places),
                sharers=max(loads[each] for each in places),
                turn=turn,
            )
        )
        numbers[group.role] += 1
    return placements


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """A worker's share of the memory of each of its devices. `kv_bytes` 0: vLLM measures what is left."""

    fraction: float
    kv_bytes: int = 0


def share_memory(placement: WorkerDevices, *, device_bytes: int, weight_bytes: int) -> MemoryShare:
    """Equal shares for the workers on a device.

    If the sizes of the device and of the weights are known (not 0), the KV memory is a fixed number, since vLLM's measurement would also
    count the memory of another worker that starts or stops at the same time. InvalidRequestError, with the arithmetic, when a share
    cannot hold the weights.
    """
    fraction = int(MEMORY_FRACTION / placement.sharers * 1000) / 1000
    if placement.sharers == 1 or not device_bytes or not weight_bytes:
        return MemoryShare(fraction=fraction)
    part = int(device_bytes * fraction)
    weights = weight_bytes // len(placement.positions)
    reserve = RESERVE_BYTES + int(part * RESERVE_FRACTION)
    kv_bytes = part - weights - reserve
    if kv_bytes < KV_BYTES_MIN:
        raise InvalidRequestError(
            f"{placement.name} gets {part / GIB:.1f} GiB ({fraction:g} of {device_bytes / GIB:.1f} GiB, shared by"
            f" {placement.sharers} workers), and needs {weights / GIB:.1f} GiB for weights and {reserve / GIB:.1f} GiB for"
            f" activations: {kv_bytes / GIB:.1f} GiB would be left for KV. Start fewer workers, or give each more GPUs"
            " (--tensor-parallel)",
            field="gpus",
        )
    return MemoryShare(fraction=fraction, kv_bytes=kv_bytes)
