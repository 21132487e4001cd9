"""One module a topic: a frozen description of what to run, and the function that runs it."""

from mooncake_lab.experiments.experiment import SCALES, Experiment, check_scale, run, vary
from mooncake_lab.experiments.record import record

__all__ = ["SCALES", "Experiment", "check_scale", "record", "run", "vary"]
