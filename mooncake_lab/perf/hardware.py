"""Machines by name: how fast they could possibly be.

Every rate here is a peak, the vendor's or the paper's, and is only used as a ceiling: what a machine
really reaches is measured (`bench.peaks`) or fitted (`perf.calibration`). Numbers of the vendors'
data sheets are for dense matrices: the often quoted twice larger ones assume structured sparsity.
The `this-cpu` of figures is no entry here: it is measured where it runs, by `bench.machine`.
"""

from dataclasses import dataclass, fields
from typing import Final

from mooncake_lab.perf.tables import named_rows


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
        for field in fields(self):
            rate = getattr(self, field.name)
            if isinstance(rate, int | float) and not rate > 0:
                raise ValueError(f"hardware {self.name!r} has {field.name} = {rate!r}; it must be positive")

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


HARDWARE: Final = named_rows("hardware.csv", Hardware)
"""The machines of both papers, and the ones this book measures on."""


def hardware(name: str) -> Hardware:
    """The peak rates of a named machine.

    Raises:
        ValueError: naming the known machines, when the name is unknown.
    """
    if name not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; allowed are {', '.join(HARDWARE)}")
    return HARDWARE[name]
