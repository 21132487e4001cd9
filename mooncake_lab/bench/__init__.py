"""Measurements of the engine, of transfers and of injected faults on this machine; and the soak of the store."""
