"""Model shapes by name: what a transformer costs to hold, to run and to remember.

Sizes are those of the published configurations. Only the paper's two 70B models matter to Mooncake;
the 13B, 33B and 175B shapes are SARATHI's, Mistral, Yi and Falcon Sarathi-Serve's, Llama's 7B is KV-Runahead's,
and the `lab-*` shapes are small Llamas that a laptop runs.
"""

from dataclasses import dataclass
from typing import Final

from mooncake_lab.perf.tables import named_rows


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


MODELS: Final = named_rows("model_shapes.csv", ModelShape)
"""The models of both papers, and the small ones this book runs for real (float32)."""


def model_shape(name: str) -> ModelShape:
    """The shape of a named model.

    Raises:
        ValueError: naming the known models, when the name is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; allowed are {', '.join(MODELS)}")
    return MODELS[name]
