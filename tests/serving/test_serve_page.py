"""The page on serving shows what this package answers."""

import re
from pathlib import Path

from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model

PAGE = Path(__file__).parents[2] / "book" / "serve.md"


def test_the_page_prints_the_tokens_of_the_engine():
    """The answer to `hello` in the page's table of calls is the greedy answer of the same random model."""
    row = re.search(r"\| tokens `([\d, ]+)`; `length`; `prompt_tokens=(\d+)`", PAGE.read_text("utf-8"))
    assert row is not None
    printed, prompt = [int(token) for token in row[1].split(",")], list(b"hello")
    engine = CoupledEngine(load_model("random:lab-tiny", device="cpu"), settings=EngineSettings(cache_blocks=64))
    (answer,) = engine.generate([prompt], max_new_tokens=len(printed))
    assert list(answer.tokens) == printed
    assert len(prompt) == int(row[2])
