"""The API reference: every public name, and what belongs to a class, from signatures and docstrings."""

import ast
import importlib
import inspect
import re
import textwrap
from functools import cache, cached_property

import pytest

from mooncake_lab.batch import reference
from mooncake_lab.batch.reference import FLOORS, PACKAGE, escaped, markdown, write_reference

MEMBER = re.compile(r"^:::\{div\} member\n```python\n(.+?)\n```\n\n(.+?)^:::$", re.DOTALL | re.MULTILINE)
FIELDS = re.compile(r"^\*\*Fields\*\*\n\n(.+?)(?=^:::|^```|\Z)", re.DOTALL | re.MULTILINE)


source_of = cache(inspect.getsource)
"""Finding a class in its file takes a while."""
page_of = cache(reference.package_page)
"""So does making the page of a package."""


@cache
def listed_classes(package):
    """Each class on a package's page with what the page says of it; the classes are the imported ones."""
    module = importlib.import_module(f"mooncake_lab.{package}")
    found = []
    inside = [importlib.import_module(f"mooncake_lab.{package}.{path.stem}") for path in modules_of(package)]
    for part in re.split(r"^```python\n(?=class )", page_of(package), flags=re.MULTILINE)[1:]:
        name = re.match(r"class (\w+)", part)[1]
        cls = next(getattr(each, name) for each in (module, *inside) if hasattr(each, name))
        found.append((cls, part.split("\n## ")[0]))
    return found


def modules_of(package):
    """The modules of a package that exports nothing itself."""
    exports = hasattr(importlib.import_module(f"mooncake_lab.{package}"), "__all__")
    return [] if exports else sorted(p for p in PACKAGE.glob(f"{package}/*.py") if p.stem[0] != "_")


def documented_methods(cls):
    """A class's own public methods and properties that have a docstring, by name; not what a base class adds."""
    source = source_of(cls)
    kinds = property | cached_property | classmethod | staticmethod
    own = {name: each for name, each in vars(cls).items() if inspect.isfunction(each) or isinstance(each, kinds)}
    return {
        name: inspect.getdoc(each)
        for name, each in own.items()
        if name[0] != "_" and each.__doc__ and f"def {name}(" in source
    }


def documented_fields(cls):
    """A class's own public fields with a string below them, in the order of the source."""
    body = ast.parse(textwrap.dedent(source_of(cls))).body[0].body
    names = [ast.unparse(node).split(":")[0].split(" =")[0] for node in body]
    said = [isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body[1:]]
    pairs = zip(body, names, said, strict=False)
    return [n for node, n, yes in pairs if yes and isinstance(node, ast.AnnAssign | ast.Assign) and n[0] != "_"]


def test_the_reference_has_every_public_name():
    """Each package has a page, and each name of its `__all__` an entry that was found in the source."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli", "chapters", "bench"}
    assert set(FLOORS) == folders
    for package in FLOORS:
        entries = page_of(package).split("\n## ")[1:]
        assert entries, package
        unexplained = [entry.splitlines()[0] for entry in entries if "```python" not in entry]
        assert package == "course" or unexplained == [], package


def test_the_contents_list_every_page_of_the_reference():
    """The book's table of contents has the page of each package, in the order of the layers."""
    contents = (PACKAGE.parent / "book" / "_toc.yml").read_text(encoding="utf-8")
    assert re.findall(r"file: reference/(?!index)(\w+)", contents) == list(FLOORS)


def test_the_reference_is_written_once(tmp_path, monkeypatch):
    """Pages that say the same already are not touched, so that a build with nothing to do does nothing."""
    monkeypatch.setattr(reference, "package_page", page_of)
    write_reference(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_reference(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert len(before) == len(FLOORS) + 1


@pytest.mark.parametrize("package", FLOORS)
def test_every_documented_method_appears_once(package):
    """Each public method or property with a docstring, with its signature and first line, and nothing else."""
    for cls, text in listed_classes(package):
        shown = {re.search(r"def (\w+)\(", head)[1]: said for head, said in MEMBER.findall(text)}
        expected = documented_methods(cls)
        assert sorted(shown) == sorted(expected), cls
        for name in expected:
            assert len(re.findall(rf"\bdef {name}\(", text)) == 1, (cls, name)
            assert shown[name].replace("\\", "").startswith(expected[name].splitlines()[0].strip()), (cls, name)


@pytest.mark.parametrize("package", FLOORS)
def test_every_documented_field_appears_once(package):
    """Each public field with a string below it is in the list of its class, in order, and no other field is."""
    for cls, text in listed_classes(package):
        listed = FIELDS.search(text)
        names = re.findall(r"^- `(\w+)`: \S", listed[1], re.MULTILINE) if listed else []
        assert names == documented_fields(cls), cls


CLASS = '''
class Shelf(Base):
    """What is kept."""
    room: int
    """How much fits, in $.

    Never negative.
    """
    bare: int = 0
    _hidden: int = 0
    """Nobody's business."""

    def __len__(self) -> int:
        """How many."""

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""

    def _check(self):
        """Nobody's business."""

    def silent(self):
        pass

    async def put(self, key: Mapping[str, int], *, a_long_name: tuple[int, ...]=(), another: str='', last: bool=False) -> None:
        """Keep it.

        Raises:
            ValueError: when it does not fit.
        """
'''  # noqa: E501 - a signature that is too long for one line is the point
SHOWN = """\
```python
class Shelf(Base):
    room: int
    bare: int = 0
```

What is kept.

**Fields**

- `room`: How much fits, in \\$.

  Never negative.

:::{div} member
```python
@property
def full(self) -> bool
```

Whether nothing more fits.
:::

:::{div} member
```python
async def put(
    self,
    key: Mapping[str, int],
    *,
    a_long_name: tuple[int, ...]=(),
    another: str='',
    last: bool=False,
) -> None
```

Keep it.


**Raises**

- `ValueError`: when it does not fit.
:::
"""


def test_a_class_is_shown_with_what_it_documents():
    """Private names, dunders and members without a docstring stay out; a long signature has a line a parameter."""
    assert markdown(ast.parse(CLASS).body[0]) == SHOWN


def test_code_is_not_escaped():
    """Outside code a bar, a dollar and a bracket are escaped; in code only a bar that would end a cell is."""
    line = "`i + j <= degree` costs $1 | less than `a|b`, <so> it is"
    assert escaped(line) == r"`i + j <= degree` costs \$1 \| less than `a|b`, \<so> it is"
    assert escaped("`a|b` | c", in_table=True) == r"`a\|b` \| c"
