"""Code as it is written in Jupyter, made Python: magics and shell commands are left out, and what is Python stays.

IPython's own transformer says what is a magic; we look only at the calls that it puts in their place.
"""

import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

UNREADABLE: Final = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` may raise for text that is not Python."""
_NOT_PYTHON: Final = frozenset(
    {
        "!",
        "HTML",
        "R",
        "SVG",
        "bash",
        "cache",
        "cmd",
        "cython",
        "file",
        "html",
        "javascript",
        "js",
        "julia",
        "latex",
    }
    | {"markdown", "perl", "pypy", "python", "python2", "python3", "ruby", "script", "sh", "sql", "svg", "sx"}
    | {"system", "writefile"}
)
"""Cell magics below which is no code of this notebook."""
_PERHAPS_A_MAGIC: Final = re.compile(r"^\s*[%!?,;/]|\?\s*$|=\s*[%!]", re.MULTILINE)
_MOST_MAGICS: Final = 25
"""In a cell; brackets that stay open let IPython read the rest of the cell again for each."""
_RUNS_ITS_LINE: Final = frozenset({"time"})
"""Line magics that execute their line in the notebook."""
_SHOWN: Final = {"system": "!", "getoutput": "!", "pinfo": "?", "pinfo2": "??", "psearch": "?"}
JUPYTER: Final = '''
def display(*shown, **options):
    """Show nothing: the grader looks at answers."""


class _Jupyter:
    def __getattr__(self, name):
        return lambda *given, **options: None


def get_ipython():
    return _Jupyter()
'''
"""Names that every notebook has, for cells that call them."""


class _Magic(NamedTuple):
    """A call that IPython puts in the place of a magic."""

    node: ast.Call
    kind: str
    """The method of `get_ipython()`."""
    told: tuple[str, ...]
    """Its arguments."""

    def __str__(self) -> str:
        """About as the student wrote it."""
        if self.kind in ("run_line_magic", "run_cell_magic"):
            name, line = self.told[:2]
            if name in _SHOWN:
                return f"{line}{_SHOWN[name]}"
            return f"{'%' if self.kind == 'run_line_magic' else '%%'}{name} {line}".strip()
        return f"{_SHOWN.get(self.kind, '')}{' '.join(self.told)}"


def is_python(text: str) -> bool:
    """Whether Python can read it, as it stands."""
    try:
        ast.parse(text)
    except UNREADABLE:
        return False
    return True


def without_magics(text: str) -> tuple[str, tuple[str, ...]]:
    """A cell without what only Jupyter understands, and what was left out of it.

    The line of `%time` and the body of `%%time` and its like stay. A name that is given the result of a magic is
    None. Nothing is changed in a cell that is Python as it stands: `%` may begin a line inside an expression.
    """
    if is_python(text):
        return text, ()
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # as Python does
    if len(_PERHAPS_A_MAGIC.findall(text)) > _MOST_MAGICS:
        return text, ()
    try:
        text = _transformed(text)
        tree = ast.parse(text)
    except (*UNREADABLE, RuntimeError):
        return text, ()  # whatever executes it says what is wrong
    if whole := _cell_magic(tree):
        python, inner = without_magics(whole.told[-1])
        if whole.told[0] in _NOT_PYTHON:
            return "", (f"{whole}, and what is below it",)
        return python, (str(whole), *inner)
    lines = [f"{line}\n".encode() for line in text.split("\n")]  # to `splitlines` a form feed ends a line, too
    statements = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    dropped: list[str] = []
    for magic in sorted(_magics(tree), key=lambda each: (each.node.lineno, each.node.col_offset), reverse=True):
        node, is_statement = magic.node, id(magic.node) in statements
        code = _line_to_run(magic, is_statement=is_statement)
        row, begin, end = node.lineno - 1, node.col_offset, node.end_col_offset or 0
        put = (code or ("pass" if is_statement else "None")).encode()
        lines[row] = lines[row][:begin] + put + lines[row][end:]
        dropped.append(f"%{magic.told[0]}" if code else str(magic))
    return b"".join(lines).decode().rstrip("\n"), tuple(reversed(dropped))


def _transformed(text: str) -> str:
    """A cell as IPython executes it.

    IPython reads a whole cell again after each magic. It gets one statement after the other, which gives the same.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    class ByStatement(TransformerManager):
        def do_token_transforms(self, lines: list[str]) -> list[str]:
            done: list[str] = []
            begin = 0
            while begin < len(lines):
                end = _statement_end(lines, begin)
                statement = lines[begin:end]
                is_magic = _PERHAPS_A_MAGIC.search("".join(statement))
                done += super().do_token_transforms(statement) if is_magic else statement
                begin = end
            return done

    return ByStatement().transform_cell(text)


def _statement_end(lines: Sequence[str], begin: int) -> int:
    """Where the statement ends that begins in a line, or the magic, whatever its brackets and quotes are."""
    if lines[begin].lstrip()[:1] in {*"%!?,;/"}:
        return next((n for n in range(begin + 1, len(lines)) if not lines[n - 1].endswith("\\\n")), len(lines))
    depth = 0
    try:
        for token in tokenize.generate_tokens(map(lines.__getitem__, range(begin, len(lines))).__next__):
            depth += (token.string in {*"([{"}) - (token.string in {*")]}"}) if token.type == tokenize.OP else 0
            depth = max(depth, 0)
            if token.type == tokenize.NEWLINE or (token.type == tokenize.NL and not depth):
                return begin + token.end[0]
    except (SyntaxError, tokenize.TokenError):
        pass
    return len(lines)


def _line_to_run(magic: _Magic, *, is_statement: bool) -> str:
    """The code that a line magic executes in the notebook; empty where there is none."""
    if magic.kind != "run_line_magic" or magic.told[0] not in _RUNS_ITS_LINE:
        return ""
    try:
        ast.parse(magic.told[1], mode="exec" if is_statement else "eval")
    except UNREADABLE:
        return ""
    return magic.told[1]


def _cell_magic(tree: ast.Module) -> _Magic | None:
    """The magic that a whole cell is the argument of."""
    found = [magic for magic in _magics(tree) if magic.kind == "run_cell_magic"]
    return found[0] if len(tree.body) == len(found) == 1 else None


def _magics(tree: ast.Module) -> Iterator[_Magic]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=kind), args=arguments
            ) if node.lineno == node.end_lineno:
                told = [each.value for each in arguments if isinstance(each, ast.Constant)]
                if told and all(isinstance(each, str) for each in told):
                    yield _Magic(node, kind, tuple(map(str, told)))
            case _:
                continue
