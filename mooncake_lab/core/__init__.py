"""The nouns: requests, service levels, block keys, the run log, units."""

from mooncake_lab.core.files import complete_file
from mooncake_lab.core.keys import answer_keys, block_keys, keyed_uniform
from mooncake_lab.core.log import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
    RunEnded,
    log_writer,
    read_log,
    write_log,
)
from mooncake_lab.core.process import rare_collections
from mooncake_lab.core.project import SCALES, carried_folder, check_scale, entry
from mooncake_lab.core.request import SLO, BlockKey, Request, TracedRequest
from mooncake_lab.core.sums import sum_in_order
from mooncake_lab.core.units import GB, GIB, KIB, MIB, TERA, blocks_for, gbps

__all__ = [
    "GB",
    "GIB",
    "KIB",
    "MIB",
    "SCALES",
    "SLO",
    "TERA",
    "Arrived",
    "BlockKey",
    "CacheChanged",
    "DecodeStretch",
    "Finished",
    "FirstToken",
    "Moved",
    "Placed",
    "Prefilled",
    "Record",
    "Rejected",
    "Request",
    "RunEnded",
    "TracedRequest",
    "answer_keys",
    "block_keys",
    "blocks_for",
    "carried_folder",
    "check_scale",
    "complete_file",
    "entry",
    "gbps",
    "keyed_uniform",
    "log_writer",
    "rare_collections",
    "read_log",
    "sum_in_order",
    "write_log",
]
