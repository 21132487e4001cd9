"""What the papers say: facts and curves by edition and place, claims and their verdicts."""

from mooncake_lab.paper.facts import Fact, Source, constant, curve, fact, index
from mooncake_lab.paper.tables import data_dir

__all__ = ["Fact", "Source", "constant", "curve", "data_dir", "fact", "index"]
