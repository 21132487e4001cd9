"""Model shapes by name: what a transformer costs to hold, to run and to remember.

Sizes are those of the published configurations. Only the paper's two 70B models matter to Mooncake;
the 13B, 33B and 175B shapes are SARATHI's, Mistral, Yi and Falcon Sarathi-Serve's, Llama's 7B is KV-Runahead's,
and the `lab-*` shapes are small Llamas that a laptop runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


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


MODELS: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        "llama2-70b": ModelShape(
            name="llama2-70b", layers=80, width=8192, query_heads=64, kv_heads=8, head_width=128,
            ffn_width=28672, vocabulary=32000,
        ),
        "llama3-70b": ModelShape(
            name="llama3-70b", layers=80, width=8192, query_heads=64, kv_heads=8, head_width=128,
            ffn_width=28672, vocabulary=128256,
        ),
        "llama3-8b": ModelShape(
            name="llama3-8b", layers=32, width=4096, query_heads=32, kv_heads=8, head_width=128,
            ffn_width=14336, vocabulary=128256,
        ),
        "llama-7b": ModelShape(
            name="llama-7b", layers=32, width=4096, query_heads=32, kv_heads=32, head_width=128,
            ffn_width=11008, vocabulary=32000,
        ),
        "llama-13b": ModelShape(
            name="llama-13b", layers=40, width=5120, query_heads=40, kv_heads=40, head_width=128,
            ffn_width=13824, vocabulary=32000,
        ),
        "llama-33b": ModelShape(
            name="llama-33b", layers=60, width=6656, query_heads=52, kv_heads=52, head_width=128,
            ffn_width=17920, vocabulary=32000,
        ),
        "yi-34b": ModelShape(
            name="yi-34b", layers=60, width=7168, query_heads=56, kv_heads=8, head_width=128,
            ffn_width=20480, vocabulary=64000,
        ),
        "mistral-7b": ModelShape(
            name="mistral-7b", layers=32, width=4096, query_heads=32, kv_heads=8, head_width=128,
            ffn_width=14336, vocabulary=32000,
        ),
        "falcon-180b": ModelShape(
            name="falcon-180b", layers=80, width=14848, query_heads=232, kv_heads=8, head_width=64,
            ffn_width=59392, ffn_matrices=2, vocabulary=65024,
        ),
        "gpt3-175b": ModelShape(
            name="gpt3-175b", layers=96, width=12288, query_heads=96, kv_heads=96, head_width=128,
            ffn_width=49152, ffn_matrices=2, vocabulary=50257, tied_embeddings=True,
        ),
        "lab-tiny": ModelShape(
            name="lab-tiny", layers=2, width=64, query_heads=4, kv_heads=2, head_width=16,
            ffn_width=192, vocabulary=256, tied_embeddings=True, bytes_per_element=4,
        ),
        "lab-recall": ModelShape(
            name="lab-recall", layers=4, width=128, query_heads=4, kv_heads=2, head_width=32,
            ffn_width=256, vocabulary=480, tied_embeddings=True, bytes_per_element=4,
        ),
        "lab-8m": ModelShape(
            name="lab-8m", layers=8, width=256, query_heads=8, kv_heads=4, head_width=32,
            ffn_width=704, vocabulary=8192, tied_embeddings=True, bytes_per_element=4,
        ),
        "lab-30m": ModelShape(
            name="lab-30m", layers=8, width=512, query_heads=8, kv_heads=4, head_width=64,
            ffn_width=1536, vocabulary=8192, tied_embeddings=True, bytes_per_element=4,
        ),
        "lab-100m": ModelShape(
            name="lab-100m", layers=12, width=768, query_heads=12, kv_heads=6, head_width=64,
            ffn_width=2304, vocabulary=16384, tied_embeddings=True, bytes_per_element=4,
        ),
    }
)  # fmt: skip  # a table: one line of dimensions reads better than ten
"""The models of both papers, and the small ones this book runs for real (float32)."""


def model_shape(name: str) -> ModelShape:
    """The shape of a named model.

    Raises:
        ValueError: naming the known models, when the name is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; allowed are {', '.join(MODELS)}")
    return MODELS[name]
