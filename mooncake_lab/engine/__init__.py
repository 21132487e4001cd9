"""Real computation: the reference engine and the machine it runs on; `engine.measure` times both."""

from mooncake_lab.engine.machine import Machine, describe_machine, measure_peaks
from mooncake_lab.engine.reference import Clock, Decoded, Prefilled, ReferenceEngine, Tokens, llama_config

__all__ = [
    "Clock",
    "Decoded",
    "Machine",
    "Prefilled",
    "ReferenceEngine",
    "Tokens",
    "describe_machine",
    "llama_config",
    "measure_peaks",
]
