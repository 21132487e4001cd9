"""Experiments: frozen descriptions of what to run, sweeps of them, kept results, and records of chapters."""

from mooncake_lab.core.extras import naming_extra

with naming_extra("book"):
    from mooncake_lab.book.experiments.experiment import (
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
    from mooncake_lab.book.experiments.parameters import check_parameters

__all__ = [
    "Experiment", "OfTrace", "at_scale", "check_parameters", "record", "records", "run", "tabulated", "value",
    "vary", "where", "whole_trace",
]  # fmt: skip
