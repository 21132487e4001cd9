"""Smaller KVCaches: the methods of four papers and their controls, on the engine's own model and kernels."""

from mooncake_lab.core.extras import naming_extra

with naming_extra("engine"):
    from mooncake_lab.compression.controls import FullCache, Oracle, RandomTokens, RecentTokens
    from mooncake_lab.compression.eviction import Combined
    from mooncake_lab.compression.held import Held, PrefilledPrompt
    from mooncake_lab.compression.kcache import KCache
    from mooncake_lab.compression.minicache import MiniCache
    from mooncake_lab.compression.pyramidinfer import PyramidInfer
    from mooncake_lab.compression.session import Method, Session
    from mooncake_lab.compression.snapkv import SnapKV

__all__ = [
    "Combined",
    "FullCache",
    "Held",
    "KCache",
    "Method",
    "MiniCache",
    "Oracle",
    "PrefilledPrompt",
    "PyramidInfer",
    "RandomTokens",
    "RecentTokens",
    "Session",
    "SnapKV",
]
