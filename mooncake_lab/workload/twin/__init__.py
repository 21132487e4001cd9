"""Twins: generated traces with the statistics of the released ones, for machines that have none.

Each workload is a small story, told at the top of its module and driven by one frozen dataclass of numbers:
people who talk (`conversation`), a pool of chats and documents (`synthetic`), conversations beside two busy
programs (`toolagent`). A story ends in drafts, requests that know whose prefix they continue (`drafts`); the
recorder gives them block ids and timestamps (`make`). The numbers are counts, chances and quantile tables
(`tables`), measured on the released traces or published; no row is copied. What a twin must meet, and how closely,
is in `data/measured/twin_targets.csv`.
"""

from mooncake_lab.workload.twin.make import make_twin

__all__ = ["make_twin"]
