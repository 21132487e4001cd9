"""What every figure of the book keeps to; the tests of a chapter say which figures it has."""

SAID = ("modelled", "counted", "measured", "predicted", "simulated", "computed", "FAST'25")


def diamonds(figure):
    """The lines of diamonds in a figure, which stand for a paper, that have points."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "D"]
    return [line for line in lines if len(line.get_xdata())]


class FigureLaws:
    """Laws of `figures[name]`: a subclass is parametrized over `name` in a module with a fixture `figures`."""

    def test_labelled_axes_say_quantity_and_unit(self, figures, name):
        """Each axis label names a quantity and, in brackets, its unit."""
        labels = [text for axes in figures[name].axes for text in (axes.get_ylabel(), axes.get_xlabel()) if text]
        assert labels
        assert all(text.endswith(")") and "(" in text for text in labels)

    def test_it_says_where_its_numbers_come_from(self, figures, name):
        """The footer says how the numbers were made."""
        assert any(word in figures[name].get_supxlabel() for word in SAID)

    def test_the_papers_points_are_open_diamonds(self, figures, name):
        """What looks like a paper's point is hollow."""
        assert {line.get_markerfacecolor() for line in diamonds(figures[name])} <= {"none"}

    def test_a_notebook_can_show_it(self, figures, name):
        """It renders to SVG, without a title above the axes."""
        assert "<svg" in figures[name]._repr_svg_()
        assert not figures[name].get_suptitle()
