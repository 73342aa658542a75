"""Descriptions of machines: how fast they compute and communicate, and how much they hold.

A plan needs rates that programs reach, not those on data sheets. Presets take the data sheet's
figures and multiply them by ``REACHED``; ``fullshard doctor --calibrate`` measures instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.errors import ConfigError

REACHED = 0.7
"""The share of a data sheet's FLOP/s and bandwidths that presets assume programs reach."""


@dataclass(frozen=True)
class Link:
    """The connection among groups of ``reach`` neighbouring ranks."""

    reach: int | None
    """Ranks 0 to reach - 1 share a link, the next ``reach`` another; None: all ranks share one."""
    bandwidth: float
    """Bytes a second that a rank receives while it sends at the same rate."""
    latency_s: float
    """Seconds that each step of a collective adds (``Hardware.exchange_s``)."""


@dataclass(frozen=True)
class Host:
    """One rank's share of the machine that its device is in."""

    memory_nbytes: int
    """Bytes of the machine's memory that the rank may use."""
    memory_bandwidth: float
    """Bytes a second that operations of the rank read or write in this memory."""
    bus_bandwidth: float
    """Bytes a second between that memory and the device's, one way."""


@dataclass(frozen=True)
class Hardware:
    """One rank's device and the links from it, innermost first."""

    name: str
    memory_nbytes: int
    """Bytes of memory that the rank may use."""
    flops: Mapping[str, float]
    """FLOP/s of large matrix products, by dtype ("bfloat16"); others count as "float32"."""
    memory_bandwidth: float
    """Bytes a second read or written by other operations."""
    links: tuple[Link, ...] = ()
    host: Host | None = None
    """The host memory for offload; None, as on a CPU: offload is not possible."""
    op_s: float = 0.0
    """Seconds of the host for each operation; a device other than the CPU runs in parallel."""
    action_s: float = 0.0
    """Seconds of the host for each action of the engine, in addition to its operations."""
    device: str = "cuda"
    """The type of the device; all but "cpu" run asynchronously, on streams."""
    in_background: bool = True
    """True if collectives progress while no rank waits for them."""
    adds_wide: bool = False
    """True if reductions add in fp32, whatever dtype is sent (our own over gloo do)."""
    granule_nbytes: int = 1
    """The allocator rounds sizes up to multiples of this."""
    fixed_nbytes: int = 0
    """Bytes that PyTorch and the device's driver hold, independent of the model."""
    communicator_nbytes: int = 0
    """Bytes that each process group holds on the device."""
    source: str = ""
    """The origin of the figures."""

    def op_duration_s(self, flops: float, nbytes: int, dtype: str) -> float:
        """Return the seconds of an operation that computes ``flops`` and touches ``nbytes``."""
        rate = self.flops.get(dtype, self.flops.get("float32", math.inf))
        return max(flops / rate, nbytes / self.memory_bandwidth)

    def exchange_s(self, what: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of a collective over ``ranks``.

        ``nbytes`` counts the parts of all ranks together. A rank receives (w - 1) / w of these
        bytes over the innermost link. Bytes from beyond the reach of a link cross the next link:
        each of the neighbours receives an equal share and passes it on. The slowest link decides.
        A mean by all-reduce counts as a reduce-scatter and an all-gather.
        """
        world, near = len(ranks), 1
        slowest_s = steps_s = 0.0
        for link in self.links:
            reached = _neighbours(ranks, link.reach)
            if reached > near:
                moved = nbytes * (world - near) / (world * near)
                slowest_s = max(slowest_s, moved / link.bandwidth)
                steps_s += (reached // near - 1) * link.latency_s
                near = reached
        total_s = slowest_s + steps_s
        return 2 * total_s if what == "all_reduce_mean" else total_s

    def save(self, path: str | Path) -> None:
        """Write this to a JSON file, for ``hardware_of``."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def _neighbours(ranks: tuple[int, ...], reach: int | None) -> int:
    """Return the number of ``ranks`` that share a link of ``reach`` ranks with the first."""
    if reach is None:
        return len(ranks)
    return sum(rank // reach == ranks[0] // reach for rank in ranks)


def _gpu(
    name: str,
    *,
    gbytes: float,
    bf16: float,
    fp32: float,
    memory: float,
    within: float,
    between: float,
    host: tuple[float, float, float, str],
    source: str,
) -> Hardware:
    """Return a node of eight GPUs: TFLOP/s, and GB/s of memory and of links, one way.

    ``host`` has four figures: GB of the node's memory, GB/s of this memory, GB/s of PCIe of each
    GPU in one way, and the name of such a machine.
    """
    return Hardware(
        name,
        memory_nbytes=int(gbytes * 1e9),
        flops={
            "bfloat16": bf16 * 1e12 * REACHED,
            "float16": bf16 * 1e12 * REACHED,
            "float32": fp32 * 1e12 * REACHED,
        },
        memory_bandwidth=memory * 1e9 * REACHED,
        links=(
            Link(8, within * 1e9 * REACHED, 3e-6),
            Link(None, between * 1e9 * REACHED, 10e-6),
        ),
        host=Host(
            memory_nbytes=int(host[0] * 1e9 / 8 * REACHED),
            memory_bandwidth=host[1] * 1e9 / 8 * REACHED,
            bus_bandwidth=host[2] * 1e9 * REACHED,
        ),
        op_s=5e-6,
        granule_nbytes=512,
        fixed_nbytes=700 << 20,
        communicator_nbytes=200 << 20,
        source=f"{source}; host: {host[3]}; op_s, latencies, fixed and communicator bytes, that "
        f"all ranks together may use {REACHED:.0%} of the host, are assumptions",
    )


_SHEET = "vendor's data sheet, dense, no sparsity"
_ROME = (409.6, 32, "2 EPYC 7742, 16 channels of DDR4-3200, PCIe 4.0 x16 (DGX A100)")
_SAPPHIRE = (614.4, 64, "2 Xeon 8480C, 16 channels of DDR5-4800, PCIe 5.0 x16 (DGX H100)")
_EMERALD = (716.8, 64, "2 Xeon 8570, 16 channels of DDR5-5600, PCIe 5.0 x16 (DGX B200)")
_LIKE_DGX_H100 = (614.4, 64, "assumed to be that of a DGX H100")
PRESETS: Mapping[str, Hardware] = {
    one.name: one
    for one in (
        _gpu("a100-40gb", gbytes=40e0, bf16=312, fp32=19.5, memory=1555, within=300, between=25,
             host=(1000, *_ROME),
             source=f"NVIDIA A100 SXM {_SHEET}; 200 Gbit/s of InfiniBand for each GPU"),
        _gpu("a100-80gb", gbytes=80e0, bf16=312, fp32=19.5, memory=2039, within=300, between=25,
             host=(2000, *_ROME),
             source=f"NVIDIA A100 SXM {_SHEET}; 200 Gbit/s of InfiniBand for each GPU"),
        _gpu("h100", gbytes=80e0, bf16=989, fp32=67, memory=3350, within=450, between=50,
             host=(2000, *_SAPPHIRE),
             source=f"NVIDIA H100 SXM {_SHEET}; 400 Gbit/s of InfiniBand for each GPU"),
        _gpu("h200", gbytes=141e0, bf16=989, fp32=67, memory=4800, within=450, between=50,
             host=(2000, *_SAPPHIRE),
             source=f"NVIDIA H200 SXM {_SHEET}; 400 Gbit/s of InfiniBand for each GPU"),
        _gpu("b200", gbytes=180e0, bf16=2250, fp32=80, memory=7700, within=900, between=50,
             host=(2000, *_EMERALD),
             source=f"NVIDIA DGX B200 {_SHEET}; 400 Gbit/s of InfiniBand for each GPU"),
        _gpu("mi300x", gbytes=192e0, bf16=1307, fp32=163.4, memory=5300, within=448, between=50,
             host=(2000, *_LIKE_DGX_H100),
             source=f"AMD MI300X {_SHEET}; 400 Gbit/s of RDMA for each GPU"),
    )
}  # fmt: skip
"""Nodes of eight GPUs by name; see ``source`` of each."""

CPU = Hardware(
    "cpu",
    memory_nbytes=16 << 30,
    flops={"float32": 50e9, "float64": 25e9, "bfloat16": 25e9},
    memory_bandwidth=10e9,
    links=(Link(None, 2e9, 100e-6),),
    device="cpu",
    op_s=5e-6,
    in_background=False,
    adds_wide=True,
    source="a guess at one core of a server; doctor --calibrate measures",
)
"""A rank on a CPU over gloo."""


def hardware_of(given: Hardware | str | Path) -> Hardware:
    """Return the given hardware: the object itself, a preset by name, or a JSON file.

    Raises:
        ConfigError: no preset and no file has this name, or the file does not describe hardware.
    """
    if isinstance(given, Hardware):
        return given
    known = {**PRESETS, CPU.name: CPU}
    if str(given) in known:
        return known[str(given)]
    path = Path(given)
    if not path.is_file():
        raise ConfigError(
            f"hardware {str(given)!r}: expected one of {', '.join(known)}, or a file that "
            "`fullshard doctor --calibrate FILE` wrote"
        )
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        links = tuple(Link(**link) for link in read["links"])
        host = None if read.get("host") is None else Host(**read["host"])
        return Hardware(**{**read, "links": links, "host": host})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no description of hardware ({error})") from error
