"""One module a topic: tables and the paper's facts in, a matplotlib figure out."""

from mooncake_lab.figures.style import (
    COLOURS,
    BookFigure,
    footer,
    legend_once,
    new_figure,
    paper_points,
    slo_line,
    styled,
)

__all__ = ["COLOURS", "BookFigure", "footer", "legend_once", "new_figure", "paper_points", "slo_line", "styled"]
