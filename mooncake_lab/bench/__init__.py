"""Measurements of the engine, the store, transfers and GPUs, each beside a baseline; and the soak of the store."""
