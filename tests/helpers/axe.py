"""What axe finds on a page of the book that keeps readers out."""

from contextlib import contextmanager

from axe_playwright_python.sync_playwright import Axe

GRAVE = {"serious", "critical"}
AXE = {"preload": False}
"""Without preloading: axe would fetch style sheets again, by paths that only hold where they were."""
CONTRAST = AXE | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""What a colour scheme can change."""
ALL_BUT_CONTRAST = AXE | {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": False}}}


EMPTY_FIGURES = """() => {
  const figures = [...document.querySelectorAll("svg[role=img][aria-label]")];
  window.figuresContents = figures.map(svg => [svg, [...svg.childNodes]]);
  for (const [svg] of window.figuresContents) svg.replaceChildren();
}"""
FILL_FIGURES = "() => { for (const [svg, nodes] of window.figuresContents) svg.replaceChildren(...nodes); }"


@contextmanager
def figures_as_images(page):
    """The page with nothing inside its figures, which are images to a screen reader.

    They are most of a chapter's elements, and axe looks at each. The contrast of their letters is checked
    by `tests/book/figures`, not by axe.
    """
    page.evaluate(EMPTY_FIGURES)
    yield
    page.evaluate(FILL_FIGURES)


def settled(page):
    """Wait until fonts are loaded and two frames are drawn, in which scripts follow what has changed."""
    page.evaluate(
        "document.fonts.ready.then(() => new Promise("
        "done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))))"
    )


def response(page, options=AXE, context=None):
    """What axe says of a page, or of part of it."""
    return Axe().run(page, context=context, options=options).response


def grave_faults(violations):
    """Serious and critical violations, each with the first places where it is."""
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]} | {node['failureSummary'][:240]}"
        for each in violations
        if each["impact"] in GRAVE
        for node in each["nodes"][:3]
    ]
