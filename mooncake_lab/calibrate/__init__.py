"""Fit the simulator's latency model to a server by its answers alone, and see what the simulator then predicts.

Any server with OpenAI's completions or chat API can be calibrated. Clients send probes and time the tokens:
prompts one at a time, crowds that decode together, prompts among them, prompts in a queue. A latency model is
fitted to them. Then clients send requests of a trace at several rates, which the simulator predicts.
"""

from mooncake_lab.core.extras import naming_extra

with naming_extra("stats"):
    from mooncake_lab.calibrate.fit import Fitted, fitted, told_apart
    from mooncake_lab.calibrate.observations import CalibrationError, Inquiry, Reply, ServedModel
    from mooncake_lab.calibrate.server import HttpServer
    from mooncake_lab.calibrate.settings import SCHEDULERS, ServerSettings, learn_settings
    from mooncake_lab.calibrate.study import Calibrated, Observed, StudyPlan, conclude, observe
    from mooncake_lab.calibrate.workload import HeldOut

__all__ = [
    "SCHEDULERS",
    "Calibrated",
    "CalibrationError",
    "Fitted",
    "HeldOut",
    "HttpServer",
    "Inquiry",
    "Observed",
    "Reply",
    "ServedModel",
    "ServerSettings",
    "StudyPlan",
    "conclude",
    "fitted",
    "learn_settings",
    "observe",
    "told_apart",
]
