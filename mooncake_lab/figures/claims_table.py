"""The claims of a scorecard as one table that a reader filters and sorts."""

import json
from dataclasses import dataclass

from mooncake_lab.figures.embed import embedded
from mooncake_lab.paper import Scorecard


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """All claims of a card; without scripts the whole table is there."""

    card: Scorecard

    def _repr_html_(self) -> str:
        papers = json.dumps([row.claim.fact.edition for row in self.card.rows]).replace("<", "\\u003c")
        return (
            f'<div class="claims-table" id="claims">{self.card.html()}'
            f'<script type="application/json">{papers}</script></div>' + embedded("widgets.css", "claims_table.js")
        )
