"""From logs and counts to numbers: latencies by both papers' definitions, hit rates, distributions."""
