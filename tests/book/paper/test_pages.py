"""What the README and the book's hand-written pages say of the package is what the package is."""

import importlib
import re
import tomllib
from pathlib import Path

import mooncake_lab
from mooncake_lab.book.paper import Verdict, claims, scope

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "mooncake_lab"
WING = {f"book.{path.parent.name}" for path in PACKAGE.glob("book/*/__init__.py")}
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"book"} | WING
doctor = importlib.import_module("mooncake_lab.cli.doctor")  # the package has a command of that name


def page(name):
    """A page's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def layers():
    """The floors that the linter holds, from the top: a set of packages each."""
    settings = tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in settings if each["type"] == "layers")
    return [set(re.findall(r"[\w.]+", layer)) for layer in contract["layers"]]


def test_every_package_is_on_a_floor():
    """The linter's layers hold each package of mooncake_lab once."""
    listed = [name for layer in layers() for name in layer]
    assert sorted(listed) == sorted(PACKAGES)


def test_the_package_map_has_the_floors_of_the_linter():
    """The docstring of the package names each package on its floor, in the order of pyproject.toml."""
    rows = re.findall(r"^    ([a-z. ·]+?)  +\S", str(mooncake_lab.__doc__), re.MULTILINE)
    assert [set(row.split(" · ")) for row in rows] == layers()


def test_the_design_page_has_the_floors_of_the_linter():
    """Its table, from the top, is the list of layers in pyproject.toml, numbered from the ground."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page("book/design.md"), re.MULTILINE)
    assert [set(re.findall(r"`([\w.]+)`", names)) for _, names in rows] == layers()
    assert [int(number) for number, _ in rows] == list(range(len(rows), 0, -1))


def test_the_glossary_and_the_front_page_name_every_verdict():
    """A reader who meets a verdict finds it explained."""
    *others, last = (each.value for each in Verdict)
    assert f"{', '.join(others)}, or {last}." in " ".join(page("book/glossary.md").split())
    shown = re.findall(r"\[([a-z ]+)\]\{\.verdict-\w+\}", page("book/intro.md"))
    assert set(shown) == {each.value for each in Verdict}


def test_all_claims_of_both_editions_are_there():
    """Mooncake's claims are numbered A01 to A27 and F01 to F45; only F20, which repeated others, is gone."""
    ids = {claim.id: claim.fact.edition for claim in claims()}
    expected = {f"A{number:02}": "arXiv v3" for number in range(1, 28)}
    expected |= {f"F{number:02}": "FAST'25" for number in range(1, 46)}
    del expected["F20"]  # half of the maximum in most scenarios: F21 to F24 are these scenarios
    assert {name: ids.get(name) for name in expected} == expected
    assert "F20" not in ids


def test_companions_are_counted_and_named_alike():
    """The scope page's number of other people's papers is that of its table, and the front page names the same."""
    companions = {item.item.split()[0] for item in scope() if item.edition == "Companions"}
    word = {4: "Four", 5: "Five", 6: "Six"}[len(companions)]
    assert f"{word} papers by other authors" in page("book/scope.md")
    corrected = page("book/intro.md").partition("## What is Mooncake's own")[2]
    assert set(re.findall(r"\*\*([^*]+)\*\*", corrected)) - {"SARATHI"} == companions


def test_the_readme_leads_to_every_chapter():
    """A visitor finds each chapter."""
    linked = re.findall(r"\]\((notebooks/\d\d_\w+\.ipynb)\)", page("README.md"))
    assert {*linked} == {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_links_of_the_readme_lead_to_files():
    """Every local link and picture of the README and of the benchmarks' page is in the repository."""
    for name in ("README.md", "benchmarks/README.md"):
        folder = (ROOT / name).parent
        found = re.findall(r"\]\(([^):]+)\)|src=\"([^\"]+)\"", page(name))
        links = {link for pair in found for link in pair if link}
        assert {link for link in links if not (folder / link).exists()} == set(), name
