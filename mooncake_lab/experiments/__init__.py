"""One module a topic: a frozen description of what to run, and the function that runs it."""

from mooncake_lab.core import SCALES, check_scale
from mooncake_lab.experiments.experiment import (
    Experiment,
    OfTrace,
    at_scale,
    record,
    records,
    run,
    tabulated,
    value,
    vary,
    where,
    whole_trace,
)

__all__ = [
    "SCALES", "Experiment", "OfTrace", "at_scale", "check_scale", "record", "records", "run", "tabulated", "value",
    "vary", "where", "whole_trace",
]  # fmt: skip
