"""What workers do: prefill, decode, or both. Each role takes orders and KVCache, and steps while it has work."""

from mooncake_lab.serving.roles.base import WorkerContext, WorkerRole
from mooncake_lab.serving.roles.coupled import CoupledRole
from mooncake_lab.serving.roles.decode import DecodeRole
from mooncake_lab.serving.roles.prefill import PrefillRole, Prompt

__all__ = ["CoupledRole", "DecodeRole", "PrefillRole", "Prompt", "WorkerContext", "WorkerRole"]
