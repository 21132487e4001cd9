"""Where in the life of a request a chapter is: the strip that opens its page."""

from collections.abc import Mapping
from html import escape
from types import MappingProxyType
from typing import Final

STEPS: Final = ("arrive", "decide", "fetch prefix", "prefill", "transfer", "decode", "finish")
"""What happens to a request, in order."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "start": STEPS,
        "traces": ("arrive",),
        "stages": ("prefill", "decode"),
        "engine": ("prefill", "decode"),
        "chunked": ("prefill",),
        "piggyback": ("prefill", "decode"),
        "pipeline": ("prefill", "decode"),
        "store": ("fetch prefix",),
        "transfer": ("fetch prefix", "transfer"),
        "placement": ("decide", "fetch prefix"),
        "endtoend": STEPS,
        "overload": ("decide", "decode"),
        "live": STEPS,
        "scorecard": (),
        "compression": ("transfer", "decode"),
    }
)
"""The steps that a chapter is about, by its topic; none for a chapter that only sums up."""


def strip(topic: str) -> str:
    """The steps as an HTML list in which those of the chapter stand out; empty for a chapter about none.

    Raises:
        ValueError: when there is no such topic.
    """
    if topic not in PARTS:
        raise ValueError(f"no chapter has the topic {topic!r}; there are {', '.join(PARTS)}")
    here = PARTS[topic]
    if not here:
        return ""
    steps = "".join(
        f'<li class="here"><strong>{escape(step)}</strong></li>' if step in here else f"<li>{escape(step)}</li>"
        for step in STEPS
    )
    return f'<div class="life" role="group" aria-label="{escape(said(topic))}"><ol>{steps}</ol></div>'


def said(topic: str) -> str:
    """What the strip shows, as a sentence."""
    here = PARTS[topic]
    if here == STEPS:
        return "In the life of a request, this chapter is about every step."
    return f"In the life of a request, this chapter is about: {', '.join(here)}."
