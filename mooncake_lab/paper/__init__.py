"""What the papers say: facts and curves by edition and place, claims and their verdicts."""

from mooncake_lab.paper.claims import Claim, claim, claims, grade
from mooncake_lab.paper.comparison import (
    Compared,
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    detail,
    marked_if_twin,
    unless_twin,
)
from mooncake_lab.paper.facts import Fact, Source, constant, curve, fact, index, points
from mooncake_lab.paper.headlines import Headline, Headlines, headlines
from mooncake_lab.paper.ledger import Assumption, ScopeItem, assumption, assumptions, scope
from mooncake_lab.paper.scorecard import Scorecard, scorecard
from mooncake_lab.paper.tables import data_dir
from mooncake_lab.paper.verdicts import (
    AGREEMENT,
    Bound,
    Evidence,
    Verdict,
    Yardstick,
    factor,
    judge,
    order,
    within,
)

__all__ = [
    "AGREEMENT",
    "Assumption",
    "Bound",
    "Claim",
    "Compared",
    "ComparisonTable",
    "Evidence",
    "Fact",
    "Headline",
    "Headlines",
    "ScopeItem",
    "Scorecard",
    "Source",
    "Verdict",
    "Yardstick",
    "assumption",
    "assumptions",
    "claim",
    "claimed",
    "claims",
    "compared",
    "comparison_table",
    "constant",
    "curve",
    "data_dir",
    "detail",
    "fact",
    "factor",
    "grade",
    "headlines",
    "index",
    "judge",
    "marked_if_twin",
    "order",
    "points",
    "scope",
    "scorecard",
    "unless_twin",
    "within",
]
