"""Real computation: the reference engine, and how fast it and its machine are."""

from mooncake_lab.engine.reference import Clock, Decoded, Prefilled, ReferenceEngine, Tokens, llama_config

__all__ = ["Clock", "Decoded", "Prefilled", "ReferenceEngine", "Tokens", "llama_config"]
