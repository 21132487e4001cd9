"""Experiments: frozen descriptions of what to run, sweeps of them, kept results, and records of chapters."""

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
    "Experiment", "OfTrace", "at_scale", "record", "records", "run", "tabulated", "value",
    "vary", "where", "whole_trace",
]  # fmt: skip
