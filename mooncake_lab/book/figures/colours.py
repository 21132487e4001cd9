"""Every colour of the book by its meaning, on light and on dark paper.

A colour has one meaning. Drawing code names the meaning, `COLOURS["vllm"]`; the page replaces the colour by its
dark variant (`figures/embed.py`, `book/_static/figures.css`). Each contrasts with both papers by at least 3:1.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_MEANINGS: Final = {
    # systems: meaning, on white, on dark
    "mooncake": ("#0069A8", "#5EB1E5"),
    "mooncake_variant": ("#3F97D3", "#A8D8F7"),
    "vllm": ("#D55E00", "#EA7A35"),
    "vllm_prefix": ("#6B5200", "#E3C878"),
    "vllm_chunked": ("#8F1F78", "#C859AF"),
    "straw_man": ("#6E6E6E", "#ABA8AB"),
    "straw_man_light": ("#929292", "#666665"),
    "here": ("#1C354C", "#B3C1CB"),
    # traces
    "conversation": ("#4837A9", "#8A78EE"),
    "toolagent": ("#2FA06A", "#86E3B5"),
    "synthetic": ("#7C1A06", "#CF6A45"),
    "all": ("#666666", "#B4B4B4"),
    # what our models were fitted to
    "fitted": ("#943CD2", "#B45CEB"),
    # what a request goes through
    "prefill": ("#00879C", "#74D8DC"),
    "decode": ("#9D45CD", "#C166E1"),
    "transfer": ("#B07C00", "#EBCF7A"),
    # where KVCache lies
    "gpu": ("#0B2E17", "#D9F5DC"),
    "dram": ("#23682A", "#82BF74"),
    "ssd": ("#7A9E3A", "#5F9440"),
    "remote": ("#A86B00", "#F5CB95"),
    # eviction, admission
    "lru": ("#C84D62", "#F0749C"),
    "lfu": ("#8A6000", "#D9A63C"),
    "length_aware": ("#0B5F80", "#4FB4D6"),
    "committed": ("#A9641C", "#F0A660"),
    "length_predicting": ("#7A1246", "#C04A7C"),
    # what became of requests
    "finished": ("#124224", "#8FC7A3"),
    "refused_late": ("#C23B22", "#F08468"),
    "refused_early": ("#8C8C8C", "#7A7A7A"),
    # methods that make a KVCache smaller
    "snapkv": ("#237D99", "#6CC3E0"),
    "pyramidinfer": ("#327309", "#ADD267"),
    "minicache": ("#7A3E9D", "#C184D8"),
    "rounding": ("#763B08", "#DA9E53"),
    "kcache": ("#C23C3F", "#ED747A"),
    # how a decode beside a chunk is accounted
    "by_tokens": ("#4F86B8", "#86B8EA"),
    "by_order": ("#8B6F00", "#D9C15A"),
    # two quantities in one panel
    "latency": ("#B51D19", "#E46484"),
    "throughput": ("#70840A", "#BFCB4A"),
    # operators of a layer, and why a pipeline waits
    "attention": ("#B8422E", "#F08A75"),
    "pb1": ("#AF8100", "#E8BE45"),
    "pb2": ("#C4432B", "#EE7B62"),
    "pb3": ("#5C5CA2", "#9E9EF1"),
    # sizes of one thing, from few to many
    "size_1": ("#7493BF", "#687A8B"),
    "size_2": ("#586A73", "#889EAE"),
    "size_3": ("#2E3952", "#B2C0CE"),
    "size_4": ("#061729", "#CED6DB"),
    # not series
    "paper": ("#000000", "#FFFFFF"),
    "slo": ("#4A4A4A", "#E4ECF4"),
    "optimum": ("#444444", "#E5E6E5"),
    "ink": ("#262626", "#E7ECF3"),
}

COLOURS: Final[Mapping[str, str]] = MappingProxyType({name: light for name, (light, _) in _MEANINGS.items()})
"""What to draw with: the colours on light paper."""

DARK: Final[Mapping[str, str]] = MappingProxyType({name: dark for name, (_, dark) in _MEANINGS.items()})
"""The same on dark paper."""

FRAME: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"axis": ("#B0B0B0", "#68717B"), "grid": ("#E8E8E8", "#2B323A"), "shade": ("#D0D0D0", "#3D4650")}
)
"""Axes, grid and empty areas, light and dark; they need no contrast."""

GROUND: Final = "#FFFFFF"
"""The paper: hollow circles and the edges of bars are filled with it."""

PAPERS: Final = ("#FFFDF9", "#121212")
"""The pages' backgrounds, light and dark."""

_LEGIBLE: Final = 4.5
"""The least contrast of small letters that WCAG allows."""


def letters(colour: str) -> str:
    """The colour for letters beside a line of this colour: the same if legible on both papers, otherwise ink."""
    dark = dict(zip(COLOURS.values(), DARK.values(), strict=True))
    legible = all(
        contrast(one, paper) >= _LEGIBLE for one, paper in zip((colour, dark[colour]), PAPERS, strict=True)
    )
    return colour if legible else COLOURS["ink"]


def contrast(one: str, other: str) -> float:
    """Contrast of two colours by WCAG's definition, 1 to 21."""
    dim, bright = sorted((_luminance(one), _luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in srgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def css_property(meaning: str) -> str:
    """The custom property of CSS that holds a colour."""
    return f"--fig-{meaning.replace('_', '-')}"
