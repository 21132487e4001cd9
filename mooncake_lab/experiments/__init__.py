"""One module a topic: a frozen description of what to run, and the function that runs it."""

from mooncake_lab.core import SCALES, check_scale
from mooncake_lab.experiments.experiment import Experiment, run, vary
from mooncake_lab.experiments.record import record

__all__ = ["SCALES", "Experiment", "check_scale", "record", "run", "vary"]
