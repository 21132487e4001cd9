"""What every figure of the book keeps to; the tests of a chapter say which figures it has."""

SAID = ("modelled", "counted", "measured", "predicted", "simulated", "computed", "FAST'25")


def diamonds(figure):
    """The lines of diamonds in a figure, which stand for a paper, that have points."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "D"]
    return [line for line in lines if len(line.get_xdata())]


class FigureLaws:
    """Laws of `figures[name]`: a subclass is parametrized over `name` in a module with a fixture `figures`."""

    def test_it_can_be_read_and_shown(self, figures, name):
        """Labels have units, the footer has a source, the paper's points are hollow, and it renders untitled."""
        figure = figures[name]
        labels = [text for axes in figure.axes for text in (axes.get_ylabel(), axes.get_xlabel()) if text]
        assert labels
        assert all(text.endswith(")") and "(" in text for text in labels)
        assert any(word in figure.get_supxlabel() for word in SAID)
        assert {line.get_markerfacecolor() for line in diamonds(figure)} <= {"none"}
        assert "<svg" in figure._repr_svg_()
        assert not figure.get_suptitle()
