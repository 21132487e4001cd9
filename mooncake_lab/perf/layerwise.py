"""Layer-wise prefill (arXiv v3 §5.2): when layers are loaded, computed and stored, in closed recurrences.

Loading and storing use a link each, in opposite directions; both move one layer at a time. A layer is computed
when the layer before it is, and when its own prefix has been loaded; it is stored once it was computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mooncake_lab.core import sum_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """When each layer was loaded, computed and stored: seconds since the prefill began, one entry a layer."""

    loaded_s: tuple[float, ...]
    computed_s: tuple[float, ...]
    stored_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """When the last layer is computed and stored."""
        return max(self.computed_s[-1], self.stored_s[-1])


def layerwise_times(load_s: Sequence[float], compute_s: Sequence[float], store_s: Sequence[float]) -> LayerTimes:
    """Loading, computing and storing at the same time, layer by layer.

    Args:
        load_s: seconds to load each layer of the prefix; zeros without a prefix.
        compute_s: seconds to compute each layer.
        store_s: seconds to store each layer; zeros where nothing is stored.

    Raises:
        ValueError: when there is no layer, the three lengths differ, or a time is negative.
    """
    _check(load_s, compute_s, store_s)
    loaded = tuple(accumulate(load_s))
    computed: list[float] = []
    stored: list[float] = []
    for ready_s, computing_s, storing_s in zip(loaded, compute_s, store_s, strict=True):
        computed.append(max(ready_s, computed[-1] if computed else 0.0) + computing_s)
        stored.append(max(computed[-1], stored[-1] if stored else 0.0) + storing_s)
    return LayerTimes(loaded_s=loaded, computed_s=tuple(computed), stored_s=tuple(stored))


def serialized_s(load_s: Sequence[float], compute_s: Sequence[float], store_s: Sequence[float]) -> float:
    """Load everything, then compute, then store: seconds.

    Raises:
        ValueError: as `layerwise_times`.
    """
    _check(load_s, compute_s, store_s)
    return sum_in_order(load_s) + sum_in_order(compute_s) + sum_in_order(store_s)


def _check(load_s: Sequence[float], compute_s: Sequence[float], store_s: Sequence[float]) -> None:
    layers = len(compute_s)
    if not layers or len(load_s) != layers or len(store_s) != layers:
        raise ValueError(
            f"times of {len(load_s)}, {layers} and {len(store_s)} layers to load, compute and store;"
            " the three must be equally many, at least 1"
        )
    smallest_s = min(*load_s, *compute_s, *store_s)
    if smallest_s < 0:
        raise ValueError(f"a layer takes {smallest_s!r} s; allowed are times from 0")
