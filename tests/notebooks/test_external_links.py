"""Links that lead out of the book: how they are written, and, among the slow tests, whether somebody answers."""

import re
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
import pytest

from mooncake_lab.book.rendering.notebook import read_notebook

LINK = re.compile(r"https?://[^\s<>\"'`|\\^{}()\[\]]+")
LOOPBACK = {"127.0.0.1", "localhost"}
GONE = {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}
NO_HEAD = {HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
TIMEOUT_S = 20


def links_of(text):
    """The links to other machines in a text, without fragments and without the full stop of their sentence."""
    bare = (link.rstrip(".,;:!?").partition("#")[0] for link in LINK.findall(text))
    return {link for link in bare if urlsplit(link).hostname not in LOOPBACK}


@pytest.fixture(scope="module")
def links(root):
    """Every distinct link of README, pages, bibliography and notebooks, and the file where it stands."""
    pages = [root / "README.md", *sorted((root / "book").glob("*.md")), root / "book" / "references.bib"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    for path in sorted((root / "notebooks").rglob("*.ipynb")):
        texts[path.name] = "\n".join(c.text for c in read_notebook(path).cells if c.cell_type == "markdown")
    return {link: name for name, text in texts.items() for link in sorted(links_of(text))}


def test_a_link_ends_where_its_sentence_goes_on():
    """Punctuation, brackets and fragments are no part of it, and this machine is no other."""
    text = "See <https://a.org/x#y>, [b](https://b.org/c), `http://127.0.0.1:8000/v1`, and https://d.org/e."
    assert links_of(text) == {"https://a.org/x", "https://b.org/c", "https://d.org/e"}


def test_links_are_encrypted_and_many(links):
    """The papers are linked, and no link sends a reader over plain HTTP."""
    assert "https://arxiv.org/abs/2407.00079" in links
    assert [f"{name}: {link}" for link, name in links.items() if not link.startswith("https://")] == []


def asked(client, link):
    """The status behind a link, by HEAD and where that is refused by GET; None where nobody answers."""
    try:
        status = client.head(link).status_code
        if status in NO_HEAD:
            with client.stream("GET", link) as answer:
                status = answer.status_code
    except httpx.HTTPError:
        return None
    return status


@pytest.mark.slow
def test_links_lead_to_somebody(links):
    """Each host answers, and none says that the page is gone; that it turns robots away is no fault of ours."""
    agent = {"User-Agent": "Mozilla/5.0 (a test of links)"}
    with (
        httpx.Client(follow_redirects=True, timeout=TIMEOUT_S, headers=agent) as client,
        ThreadPoolExecutor(max_workers=8) as pool,
    ):
        answers = dict(zip(links, pool.map(lambda link: asked(client, link), links), strict=True))
    if HTTPStatus.OK not in answers.values():
        pytest.skip(f"none of {len(links)} links opens: no network here")
    broken = [f"{links[link]}: {link}: {status}" for link, status in answers.items() if status in {None, *GONE}]
    assert broken == []
