"""Draws that depend on names, not on order: the same seed and the same names give the same number."""

import xxhash


def keyed_uniform(seed: int, *names: int | str | bytes) -> float:
    """A number uniform in [0, 1) that only the seed and the names decide.

    Policies use it instead of a random generator, so that they hold no state and their decisions replay.
    """
    digest = xxhash.xxh3_64(seed=seed % 2**64)
    for name in names:
        raw = name if isinstance(name, bytes) else str(name).encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return (digest.intdigest() >> 11) / 2**53
