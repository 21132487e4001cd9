"""The recipes of the page on adding parts, followed to the letter."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "extend.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE))
FILE = re.compile(
    r"^```\{code-block\} (?:python|text)\n:caption: ([^,\n]+)(?:, (.+))?\n((?:.*\n)*?)```$", re.MULTILINE
)
CONSOLE = re.compile(r"^```console\n((?:.*\n)*?)```$", re.MULTILINE)


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the recipes change, with what they ask of a reader, and with the compiled CPU kernels."""
    for name in ("mooncake_lab", "tests/contract", "notebooks", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "helpers").symlink_to(ROOT / "tests" / "helpers")
    (tmp_path / "prompts.json").write_text("[[1, 2, 3], [4]]")
    request = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(request) + "\n")
    return tmp_path


def insert(path, place, code):
    """Add the lines of a block where its caption says."""
    text = path.read_text(encoding="utf-8")
    if place == "last line":
        path.write_text(text + code, encoding="utf-8")
        return
    name = place.removeprefix("before ")
    pattern = r"^(?=(?:from|import) )" if place == "imports" else rf"^{name}\b.*?\{{\n"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found, f"{path.name} has no {place}"
    at = found.start() if place.startswith("before ") else found.end()
    path.write_text(text[:at] + code + "\n" * 2 * place.startswith("before ") + text[at:], encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_works_as_it_stands(recipe, checkout):
    """Its files are written, its lines inserted, and its commands end well; a test among them runs something."""
    blocks = FILE.findall(RECIPES[recipe])
    assert blocks
    for name, place, code in blocks:
        if place:
            insert(checkout / name, place, code)
        else:
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text(code, encoding="utf-8")
    commands = "".join(CONSOLE.findall(RECIPES[recipe])).splitlines()
    assert commands
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    for command in commands:
        words = shlex.split(command.removeprefix("$ "))
        words[0] = words[0].replace(".venv/bin", str(Path(sys.executable).parent))
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr  # pytest without a test exits with 5
