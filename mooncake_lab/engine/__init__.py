"""Real computation: a Llama model that prefills and decodes on this machine, with PyTorch and compiled kernels.

What describes a model is imported at once; what needs torch, when it is first used. The process in front of a live
cluster only checks the model, and never loads torch.
"""

from typing import TYPE_CHECKING

from mooncake_lab.core.extras import naming_extra
from mooncake_lab.core.process import lazy_names
from mooncake_lab.engine.config import LlamaConfig, RopeScaling, config_from_shape, read_config

with naming_extra("engine"):
    from mooncake_lab.engine.checkpoint import check_model

if TYPE_CHECKING:
    from mooncake_lab.engine.backends import Backend, choose_backend
    from mooncake_lab.engine.blocks import BlockAllocator
    from mooncake_lab.engine.kvcache import KVCache, KVSpan
    from mooncake_lab.engine.loading import load_model, warm_up
    from mooncake_lab.engine.loop import Engine, EngineSettings
    from mooncake_lab.engine.model import LlamaModel, make_model
    from mooncake_lab.engine.roles import CoupledEngine, DecodeEngine, PrefillEngine, PrefillResult
    from mooncake_lab.engine.sampling import GREEDY, Sampling, sample
    from mooncake_lab.engine.sequence import GenerationRequest, Output
    from mooncake_lab.engine.weights import LlamaWeights, load_weights, random_weights

__all__ = [
    "GREEDY",
    "Backend",
    "BlockAllocator",
    "CoupledEngine",
    "DecodeEngine",
    "Engine",
    "EngineSettings",
    "GenerationRequest",
    "KVCache",
    "KVSpan",
    "LlamaConfig",
    "LlamaModel",
    "LlamaWeights",
    "Output",
    "PrefillEngine",
    "PrefillResult",
    "RopeScaling",
    "Sampling",
    "check_model",
    "choose_backend",
    "config_from_shape",
    "load_model",
    "load_weights",
    "make_model",
    "random_weights",
    "read_config",
    "sample",
    "warm_up",
]

__getattr__ = lazy_names(
    __name__,
    "backends", "blocks", "kvcache", "model", "sampling", "sequence", "weights", "loop", "roles", "loading",
    extra="engine",
)  # fmt: skip
