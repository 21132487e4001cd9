"""How long things take: model shapes, hardware, FLOPs and bytes, latency models and their calibration."""
