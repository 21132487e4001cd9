"""One module a topic: a frozen description of what to run, and the function that runs it."""

from mooncake_lab.core import SCALES, check_scale
from mooncake_lab.experiments.experiment import Experiment, record, records, run, value, vary, where

__all__ = ["SCALES", "Experiment", "check_scale", "record", "records", "run", "value", "vary", "where"]
