"""KVCache of a request by kind of attention: bytes that are held, tokens that a step reads, reusable prefixes.

Attention to all tokens keeps keys and values of each. Some models keep less: latent attention (MLA) keeps one
vector in place of all heads, a sliding window keeps its last tokens only, and recurrent layers (linear attention,
Mamba) keep a state of fixed size. A model mixes such layers, so its KVCache is a sum over groups of equal layers.

A prefix can be reused up to where all its layers were kept. Full attention can be cut anywhere. A window or a
state is as it was at one place, so engines keep checkpoints of them, and reuse ends on one.
"""

from dataclasses import dataclass
from typing import Final

from mooncake_lab.perf.specs import ModelShape

DEFAULT_CHECKPOINT_TOKENS: Final = 512
"""Tokens from one checkpoint of windows and states to the next: a block of the released traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep equal KVCache.

    Raises:
        ValueError: when a number is out of range, or the layers keep nothing.
    """

    kind: str
    """In words, such as `full attention`."""
    layers: int
    token_bytes: int = 0
    """Of one layer, for each token that it keeps."""
    window_tokens: int | None = None
    """The most tokens that it keeps; None keeps all."""
    read_at_most_tokens: int | None = None
    """The most tokens that a decode step reads of those kept (sparse attention); None reads all."""
    state_bytes: int = 0
    """Of one layer, whatever the length of the request."""
    factors: str
    """How the bytes of one layer come about, for people."""

    def __post_init__(self) -> None:
        bounds = (self.window_tokens, self.read_at_most_tokens)
        if (
            self.layers < 1
            or min(self.token_bytes, self.state_bytes) < 0
            or any(b is not None and b < 1 for b in bounds)
        ):
            raise ValueError(f"{self} has a number out of range; layers and windows are from 1, bytes from 0")
        if not (self.token_bytes or self.state_bytes):
            raise ValueError(f"{self} keeps nothing; leave such layers out")

    @property
    def keeps_everything(self) -> bool:
        """Whether a shorter prefix is part of what is kept of a longer one."""
        return self.window_tokens is None and not self.state_bytes

    def kept_tokens(self, tokens: int) -> int:
        """Tokens of a request of this length that a layer keeps."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of all layers of the group."""
        return self.layers * (self.token_bytes * self.kept_tokens(tokens) + self.state_bytes)

    def read_bytes(self, tokens: int) -> int:
        """Bytes of kept tokens that a decode step reads; states are read, too, but do not grow."""
        read = self.kept_tokens(tokens)
        if self.read_at_most_tokens is not None:
            read = min(read, self.read_at_most_tokens)
        return self.layers * self.token_bytes * read

    def equation(self) -> str:
        """The bytes of the group for a request of n tokens."""
        kept = "n" if self.window_tokens is None else f"min(n, {self.window_tokens:,})"
        return f"{self.layers} layers x {self.factors}" + (f" x {kept}" if self.token_bytes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The KVCache of a model's requests.

    Raises:
        ValueError: when there are no groups, none keeps tokens, or checkpoints are less than a token apart.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    checkpoint_tokens: int = DEFAULT_CHECKPOINT_TOKENS
    """From one checkpoint of windows and states to the next; without such layers it has no effect."""

    def __post_init__(self) -> None:
        if not any(group.token_bytes for group in self.groups):
            raise ValueError(
                f"the KVCache of {self.name!r} has no layer that keeps tokens; at least one is needed"
            )
        if self.checkpoint_tokens < 1:
            raise ValueError(
                f"{self.name!r} has a checkpoint every {self.checkpoint_tokens} tokens; at least 1 is needed"
            )

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token while every layer still keeps it."""
        return sum(group.layers * group.token_bytes for group in self.groups)

    @property
    def is_linear(self) -> bool:
        """Whether bytes are proportional to tokens, and a step reads all of them."""
        return all(group.keeps_everything and group.read_at_most_tokens is None for group in self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """The lengths of a request at which the growth of `kv_bytes` or `read_tokens` changes, rising."""
        bounds = [each for group in self.groups for each in (group.window_tokens, group.read_at_most_tokens)]
        return tuple(sorted({bound for bound in bounds if bound is not None}))

    def kv_bytes(self, tokens: int) -> int:
        """Bytes that a request of this length holds, and that are moved with it; 0 for none."""
        return sum(group.kv_bytes(tokens) for group in self.groups) if tokens else 0

    def read_tokens(self, tokens: int) -> float:
        """What a decode step reads of a request of this length, in tokens that all layers read.

        That is the mean over layers of the smaller of tokens and window, each layer weighted by its bytes a token.
        A model without windows reads its tokens.
        """
        if self.is_linear:
            return tokens
        return sum(group.read_bytes(tokens) for group in self.groups) / self.full_token_bytes

    def read_growth(self, tokens: int) -> float:
        """By how much `read_tokens` grows with the next token; it is constant up to the next of `windows`."""
        return self.read_tokens(tokens + 1) - self.read_tokens(tokens)

    def reusable_tokens(self, matched: int) -> int:
        """The longest prefix of these that ends on a checkpoint; all of them where everything is kept."""
        if all(group.keeps_everything for group in self.groups):
            return matched
        return matched - matched % self.checkpoint_tokens

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: full windows and states. 0 where everything is kept."""
        partial = [group for group in self.groups if not group.keeps_everything]
        return sum(group.kv_bytes(group.window_tokens or 0) for group in partial)

    def equations(self) -> list[str]:
        """`kv_bytes`, `read_tokens` and `reusable_tokens` as equations of the length n, one a line."""
        states = sum(group.layers * group.state_bytes for group in self.groups)
        held = _terms([(group.layers * group.token_bytes, group.window_tokens) for group in self.groups], ",")
        lines = [f"kv_bytes(n) = {held}" + (f" + {states:,}" if states else "")]
        shares = [(g.layers * g.token_bytes / self.full_token_bytes, _smallest(g)) for g in self.groups]
        lines.append(f"read_tokens(n) = {_terms(shares, '.4g')}")
        steps = f"floor(n / {self.checkpoint_tokens}) x {self.checkpoint_tokens}"
        lines.append(f"reusable_tokens(n) = {'n' if not self.checkpoint_bytes() else steps}")
        return lines


def linear_kvcache(shape: ModelShape) -> KVCacheShape:
    """The KVCache of a named shape, whose layers all attend to all tokens."""
    size = shape.bytes_per_element
    group = LayerGroup(
        kind="full attention",
        layers=shape.layers,
        token_bytes=2 * shape.kv_width * size,
        factors=f"2 x {shape.kv_heads} KV heads x {shape.head_width} x {size} B",
    )
    return KVCacheShape(name=shape.name, groups=(group,))


def _smallest(group: LayerGroup) -> int | None:
    bounds = [each for each in (group.window_tokens, group.read_at_most_tokens) if each is not None]
    return min(bounds, default=None)


def _terms(parts: list[tuple[float, int | None]], form: str) -> str:
    """A sum of factors of the length, or of the smaller of it and a bound; equal bounds are one term."""
    factors = dict[int | None, float]()
    for factor, bound in parts:
        if factor:
            factors[bound] = factors.get(bound, 0) + factor
    kept = {bound: "n" if bound is None else f"min(n, {bound:,})" for bound in factors}
    return " + ".join(
        kept[bound] if factor == 1 else f"{factor:{form}} {kept[bound]}" for bound, factor in factors.items()
    )
