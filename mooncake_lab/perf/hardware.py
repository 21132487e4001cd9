"""Machines by name: how fast they could possibly be.

Every rate here is a peak, the vendor's or the paper's, and is only used as a ceiling: what a machine
really reaches is measured (`engine.measure`) or fitted (`perf.calibration`). Numbers of the vendors'
data sheets are for dense matrices: the often quoted twice larger ones assume structured sparsity.
The `this-cpu` of figures is no entry here: it is measured where it runs, by `engine.measure`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mooncake_lab.core import GB, TERA, gbps


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peak rates of a node: its devices together, and the links that feed them.

    Raises:
        ValueError: when a rate or the number of devices is not positive.
    """

    name: str
    devices: int
    bfloat16_flops_per_s: float
    """Peak of one device with dense bfloat16 matrices."""
    float32_flops_per_s: float
    device_memory_bytes: float
    device_memory_bytes_per_s: float
    host_to_device_bytes_per_s: float | None = None
    """Host memory to device memory, the whole node; None where both are the same memory or unknown."""
    nic_bytes_per_s: float | None = None
    """Network, the whole node, one direction; None without a network."""
    source: str
    """Where the numbers come from, in one line."""

    def __post_init__(self) -> None:
        rates = {
            "devices": self.devices,
            "device_memory_bytes": self.device_memory_bytes,
            "device_memory_bytes_per_s": self.device_memory_bytes_per_s,
            "host_to_device_bytes_per_s": self.host_to_device_bytes_per_s,
            "nic_bytes_per_s": self.nic_bytes_per_s,
            "bfloat16_flops_per_s": self.bfloat16_flops_per_s,
            "float32_flops_per_s": self.float32_flops_per_s,
        }
        for name, rate in rates.items():
            if rate is not None and not rate > 0:
                raise ValueError(f"hardware {self.name!r} has {name} = {rate!r}; it must be positive")

    def flops_per_s(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of all devices together (`G` in FAST'25 Table 1).

        Raises:
            ValueError: naming the known data types, when there is no rate for this one.
        """
        peaks = {"bfloat16": self.bfloat16_flops_per_s, "float32": self.float32_flops_per_s}
        if dtype not in peaks:
            raise ValueError(f"hardware {self.name!r} has no peak for {dtype!r}; allowed are {', '.join(peaks)}")
        return self.devices * peaks[dtype]

    @property
    def memory_bytes(self) -> float:
        """Device memory of the node."""
        return self.devices * self.device_memory_bytes

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak memory bandwidth of all devices together."""
        return self.devices * self.device_memory_bytes_per_s


HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "a800-node": Hardware(
            name="a800-node",
            devices=8,  # FAST'25 Table 1
            bfloat16_flops_per_s=312 * TERA,  # FAST'25 Table 1
            float32_flops_per_s=19.5 * TERA,  # A100 data sheet
            device_memory_bytes=80 * GB,  # FAST'25 §5.1 names the 80 GB card
            device_memory_bytes_per_s=2039 * GB,  # A100 80GB SXM data sheet; the A800 differs in NVLink only
            host_to_device_bytes_per_s=128 * GB,  # FAST'25 Table 1
            nic_bytes_per_s=gbps(800),  # FAST'25 Table 1: 4 x 200 Gbps
            source="FAST'25 Table 1; memory: NVIDIA A100 80GB SXM data sheet",
        ),
        "h800-node": Hardware(
            name="h800-node",
            devices=8,
            bfloat16_flops_per_s=989 * TERA,  # H100 SXM data sheet; not printed in the paper
            float32_flops_per_s=67 * TERA,
            device_memory_bytes=80 * GB,
            device_memory_bytes_per_s=3350 * GB,  # H100 SXM data sheet
            host_to_device_bytes_per_s=256 * GB,  # assumed: the A800 node's layout with PCIe 5.0, twice Table 1
            nic_bytes_per_s=gbps(8 * 400),  # FAST'25 Fig. 12, right
            source="NVIDIA H100 SXM data sheet; network: FAST'25 Fig. 12; host link assumed",
        ),
        "h200-node": Hardware(
            name="h200-node",
            devices=8,
            bfloat16_flops_per_s=989 * TERA,
            float32_flops_per_s=67 * TERA,
            device_memory_bytes=141 * GB,
            device_memory_bytes_per_s=4800 * GB,
            host_to_device_bytes_per_s=256 * GB,  # assumed, as for the H800 node
            nic_bytes_per_s=gbps(8 * 400),  # assumed, as for the H800 node
            source="NVIDIA H200 SXM data sheet; host link and network assumed to be those of the H800 node",
        ),
        "a100": Hardware(
            name="a100",
            devices=1,
            bfloat16_flops_per_s=312 * TERA,
            float32_flops_per_s=19.5 * TERA,
            device_memory_bytes=80 * GB,
            device_memory_bytes_per_s=2039 * GB,
            host_to_device_bytes_per_s=32 * GB,  # PCIe 4.0 x16, one direction
            source="NVIDIA A100 80GB SXM data sheet",
        ),
        "a6000": Hardware(
            name="a6000",
            devices=1,
            bfloat16_flops_per_s=154.8 * TERA,
            float32_flops_per_s=38.7 * TERA,
            device_memory_bytes=48 * GB,
            device_memory_bytes_per_s=768 * GB,
            host_to_device_bytes_per_s=32 * GB,  # PCIe 4.0 x16, one direction
            source="NVIDIA RTX A6000 data sheet (GA102 white paper)",
        ),
        "a40": Hardware(
            name="a40",
            devices=1,
            bfloat16_flops_per_s=149.7 * TERA,
            float32_flops_per_s=37.4 * TERA,
            device_memory_bytes=48 * GB,
            device_memory_bytes_per_s=696 * GB,
            host_to_device_bytes_per_s=32 * GB,  # PCIe 4.0 x16, one direction
            source="NVIDIA A40 data sheet",
        ),
        "h200": Hardware(
            name="h200",
            devices=1,
            bfloat16_flops_per_s=989 * TERA,
            float32_flops_per_s=67 * TERA,
            device_memory_bytes=141 * GB,
            device_memory_bytes_per_s=4800 * GB,
            host_to_device_bytes_per_s=64 * GB,  # PCIe 5.0 x16, one direction
            source="NVIDIA H200 SXM data sheet",
        ),
    }
)
"""The machines of both papers, and the ones this book measures on."""


def hardware(name: str) -> Hardware:
    """The peak rates of a named machine.

    Raises:
        ValueError: naming the known machines, when the name is unknown.
    """
    if name not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; allowed are {', '.join(HARDWARE)}")
    return HARDWARE[name]
