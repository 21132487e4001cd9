"""What axe finds on a page of the book that keeps readers out."""

from axe_playwright_python.sync_playwright import Axe

GRAVE = {"serious", "critical"}
AXE = {"preload": False}
"""Without preloading: axe would fetch style sheets again, by paths that only hold where they were."""
CONTRAST = AXE | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""What a colour scheme can change."""
ALL_BUT_CONTRAST = AXE | {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": False}}}


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
