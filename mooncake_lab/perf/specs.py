"""Models and machines by name: what a transformer costs to hold, run and remember, and how fast a machine can be.

Sizes of models are those of the published configurations. Only the paper's two 70B models matter to Mooncake; the
13B, 33B and 175B shapes are SARATHI's, Mistral, Yi and Falcon Sarathi-Serve's, Llama's 7B is KV-Runahead's, and
the `lab-*` shapes are small Llamas that a laptop runs.

Every rate of a machine is a peak, the vendor's or the paper's, and is only used as a ceiling: what a machine
really reaches is measured (`bench.peaks`) or fitted (`perf.calibration`). Numbers of the vendors' data sheets are
for dense matrices: the often quoted twice larger ones assume structured sparsity. The `this-cpu` of figures is no
entry here: it is measured where it runs, by `bench.machine`.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from mooncake_lab.core import carried_folder, entry

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder-only transformer; everything countable follows from them.

    Biases and learned position tables (GPT-3 has both) are not counted: below 0.02 % of its parameters.

    Raises:
        ValueError: when a size is not positive or the query heads do not divide among the KV heads.
    """

    name: str
    layers: int
    width: int
    """Elements of one hidden state (`d` in FAST'25 Table 1)."""
    query_heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    ffn_matrices: int = 3
    """3 for the gated feed-forward of Llama, 2 for the plain one of GPT-3."""
    vocabulary: int
    tied_embeddings: bool = False
    """Whether the input table is also the output head."""
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.query_heads, self.kv_heads, self.head_width, self.ffn_width)
        if min(*sizes, self.ffn_matrices, self.vocabulary, self.bytes_per_element) < 1:
            raise ValueError(f"model {self.name!r} has a size below 1 among its dimensions; all must be positive")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"model {self.name!r} has {self.query_heads} query heads on {self.kv_heads} KV heads;"
                " the first must be a multiple of the second"
            )

    @property
    def gqa(self) -> int:
        """Query heads that share one KV head (FAST'25 Table 1)."""
        return self.query_heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Elements of all query heads of one token and layer."""
        return self.query_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of all keys (or all values) of one token and layer."""
        return self.kv_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that multiply every token: projections and feed-forward."""
        attention = 2 * self.width * (self.query_width + self.kv_width)
        return attention + self.ffn_matrices * self.width * self.ffn_width

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, used once a generated token."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights: layers, normalisations, input table and output head."""
        norms = (2 * self.layers + 1) * self.width
        tables = self.head_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + norms + tables

    @property
    def weight_bytes(self) -> int:
        """Bytes to hold the weights."""
        return self.parameters * self.bytes_per_element

    @property
    def streamed_weight_bytes(self) -> int:
        """Bytes of weights one decode step must read: all but the rows of the input table it skips."""
        return (self.layers * self.layer_parameters + self.head_parameters) * self.bytes_per_element

    @property
    def kv_bytes_per_token(self) -> int:
        """KVCache bytes of one token over all layers: `l * (2 d / gqa) * s` in FAST'25 §2.2."""
        return 2 * self.layers * self.kv_width * self.bytes_per_element


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


def _named_rows(file_name: str, kind: type[Row]) -> Mapping[str, Row]:
    """The rows of a CSV file of `data/paper` by their column `name`; an empty field has its default."""
    with (carried_folder("paper") / file_name).open(encoding="utf-8", newline="") as file:
        rows = [{column: text for column, text in row.items() if text} for row in csv.DictReader(file)]
    return MappingProxyType({row["name"]: msgspec.convert(row, kind, strict=False) for row in rows})


MODELS: Final = _named_rows("model_shapes.csv", ModelShape)
"""The models of both papers, and the small ones this book runs for real (float32)."""

HARDWARE: Final = _named_rows("hardware.csv", Hardware)
"""The machines of both papers, and the ones this book measures on."""


def model_shape(name: str) -> ModelShape:
    """The shape of a named model.

    Raises:
        ValueError: naming the known models, when the name is unknown.
    """
    return entry(MODELS, name, "unknown model")


def hardware(name: str) -> Hardware:
    """The peak rates of a named machine.

    Raises:
        ValueError: naming the known machines, when the name is unknown.
    """
    return entry(HARDWARE, name, "unknown hardware")
