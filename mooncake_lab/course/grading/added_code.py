"""What is executed of the code that a student added: what the solution needs, and no experiments.

A task executes the notebook in a new process and has a limit of time, so that an experiment in an added cell could
cost all points. Definitions, imports and constants are kept. Any other statement is kept if it gives a value to a
name, or changes the value of a name, that a solution cell uses, directly or through other kept statements.
"""

import ast
import symtable
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_lab.course.grading.jupyter_code import UNREADABLE

_PLAIN_CALLS: Final = frozenset(
    {"dict", "list", "set", "tuple", "frozenset", "range", "namedtuple"}
    | {"OrderedDict", "defaultdict", "deque", "Counter"}
)
"""What a constant may call: it makes a value and computes nothing."""
_SHOWS: Final = frozenset({"print", "display", "len", "repr", "str", "type", "help"})
"""Functions that change nothing."""
_HIDES: Final = frozenset({"exec", "eval", "globals", "locals", "vars", "compile"})
"""Functions that can set a name without writing it."""
_LONGEST_SHOWN: Final = 60

_UNUSED: Final = "no solution cell uses it"
_HIDDEN: Final = "the grader does not see which names it sets; write `name = value`"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a piece of code that live in the notebook."""

    bound: frozenset[str] = frozenset()
    """Those that get a value."""
    used_now: frozenset[str] = frozenset()
    """Those that are needed when it is executed."""
    used_later: frozenset[str] = frozenset()
    """Those that its functions need when they are called."""


@dataclass(slots=True)
class AddedStatement:
    """A statement that a student added; mutable because what becomes of it is found out step by step."""

    text: str
    names: Names
    changed: frozenset[str]
    """Names of which it sets a part: `table[3] = 1`."""
    method_of: frozenset[str]
    """Names of which it calls a method and does nothing with the result: `log.setLevel(10)`."""
    passed: frozenset[str]
    """Names that it hands to calls and does nothing with the result: `random.shuffle(order)`."""
    alias_of: tuple[str, str] | None
    """A name, and the one whose value it gets: `queue = waiting`."""
    is_definition: bool
    is_import: bool
    is_plain: bool
    """Whether it calls nothing to compute the arguments of such a method, and does not loop."""
    called: str = ""
    """The function that it calls, where it is a call and nothing else."""
    why_not: str = _UNUSED
    """Why it is left out; empty where it is kept."""

    @property
    def shown(self) -> str:
        """Its beginning, for a remark."""
        line = self.text.split("\n", maxsplit=1)[0]
        return f"`{line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + '…'}`"


def statements_of(tree: ast.Module) -> list[AddedStatement]:
    """The statements of a cell.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: when the code cannot be compiled.
    """
    return [
        AddedStatement(
            text=(text := ast.unparse(statement)),
            names=names_of(text),
            changed=frozenset(_changed(statement)),
            method_of=frozenset(_methods_of(statement)),
            passed=frozenset(_passed(statement)),
            alias_of=_alias(statement),
            is_definition=_defines(statement),
            is_import=isinstance(statement, ast.Import | ast.ImportFrom),
            is_plain=_is_plain_call(statement),
            called=_called(statement),
            why_not=_HIDDEN if _hides(statement) else _UNUSED,
        )
        for statement in tree.body
    ]


def names_of(text: str) -> Names:
    """The names that a piece of code binds and uses in the notebook; none where it is not Python."""
    try:
        top = symtable.symtable(text, "cell", "exec")
    except UNREADABLE:
        return Names()
    bound, now, later = set[str](), set[str](), set[str]()
    for symbol in top.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            bound.add(symbol.get_name())
        if symbol.is_referenced():
            now.add(symbol.get_name())
    waiting = [(table, False) for table in top.get_children()]
    while waiting:
        table, in_function = waiting.pop()
        is_called_later = in_function or (table.get_type() == "function" and table.get_name() not in _AT_ONCE)
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                (later if is_called_later else now).add(symbol.get_name())
        waiting += [(child, is_called_later) for child in table.get_children()]
    return Names(frozenset(bound), frozenset(now), frozenset(later))


_AT_ONCE: Final = frozenset({"listcomp", "setcomp", "dictcomp", "genexpr"})
"""Functions of Python's own making, which run where they stand."""


def choose(statements: Sequence[AddedStatement], solutions: Iterable[str], asked: Collection[str]) -> None:
    """Decide which statements are executed.

    Args:
        statements: of all added code, in order. Those that are kept lose their `why_not`.
        solutions: the code of the student's solution cells.
        asked: names that the grader asks for.
    """
    own = [names_of(text) for text in solutions]
    makers = _makers(statements, {*asked}.union(*(names.bound for names in own)))
    needed: set[str] = set()
    waiting = [
        *asked,
        *(name for names in own for part in (names.bound, names.used_now, names.used_later) for name in part),
    ]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            for each in makers.get(name, ()):
                each.why_not = ""
                waiting += [*each.names.used_now, *each.names.used_later]
    _keep_definitions(statements)


def _makers(statements: Sequence[AddedStatement], solved: Collection[str]) -> dict[str, list[AddedStatement]]:
    """By name, the statements that give it a value or change that value.

    A call of a method counts for a value that the student's own statements made, as does a call that gets this
    value. Of a module it counts where it computes nothing else (`np.random.seed(0)`). What uses names that the
    solution makes never counts: that is an experiment.
    """
    values = {name for each in statements if not each.is_import for name in each.names.bound}
    called = {each.called for each in statements if each.called}
    effects = {name: _globals_set(each) for each in statements for name in each.names.bound & called}
    makers: dict[str, list[AddedStatement]] = defaultdict(list)
    same = dict(each.alias_of for each in statements if each.alias_of is not None)
    for each in statements:
        passed = each.passed & values - {*solved} if not each.names.used_now & {*solved} else frozenset[str]()
        methods = {name for name in each.method_of if name in values or each.is_plain} - {*solved}
        for name in each.names.bound | each.changed | methods | passed | effects.get(each.called, frozenset()):
            makers[name].append(each)
        for name in each.changed | methods | passed:
            if name in same:
                makers[same[name]].append(each)
    return makers


def _keep_definitions(statements: Sequence[AddedStatement]) -> None:
    """Keep also the definitions that no solution uses by name, where all that they need at once is there."""
    made = {name for each in statements for name in each.names.bound}
    there = {name for each in statements if not each.why_not for name in each.names.bound}
    for each in statements:
        if each.why_not and each.is_definition:
            lacking = sorted((each.names.used_now & made) - there)
            each.why_not = f"it needs {lacking[0]!r}, which was left out" if lacking else ""
            there |= each.names.bound if not lacking else set()


def _globals_set(definition: AddedStatement) -> frozenset[str]:
    """The global names that the functions of a definition set."""
    tree = ast.parse(definition.text)
    return frozenset(name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names)


def _called(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name
        case _:
            return ""


def _changed(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                yield from _root(node)
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name
            case _:
                continue


def _methods_of(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                yield from _root(method)
            case _:
                continue


def _passed(statement: ast.stmt) -> Iterator[str]:
    chains = (node.value for node in ast.walk(statement) if isinstance(node, ast.Expr))
    for call in (part for chain in chains for part in _chain(chain) if isinstance(part, ast.Call)):
        if not (isinstance(call.func, ast.Name) and call.func.id in _SHOWS):
            for given in (*call.args, *(each.value for each in call.keywords)):
                yield from _root(given.value if isinstance(given, ast.Starred) else given)


def _hides(statement: ast.stmt) -> bool:
    """Whether a statement, outside the functions that it defines, may set names that it does not show."""
    return not _defines(statement) and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _HIDES
        for node in ast.walk(statement)
    )


def _alias(statement: ast.stmt) -> tuple[str, str] | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)):
            return name, other
        case _:
            return None


def _is_plain_call(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(), args=arguments, keywords=named)):
            return all(map(_computes_nothing, (*arguments, *(each.value for each in named))))
        case _:
            return False


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """`name.field[3].method()`, what its method belongs to, and so on to the name at the left."""
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _root(node: ast.expr) -> Iterator[str]:
    """The name at the left of a chain."""
    *_, left = _chain(node)
    if isinstance(left, ast.Name):
        yield left.id


def _defines(statement: ast.stmt) -> bool:
    """Whether a statement is a definition, an import or a constant: it computes nothing."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _computes_nothing(value)
        case _:
            return False


def _computes_nothing(value: ast.expr) -> bool:
    """Whether a value is written down, in containers perhaps."""
    calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
    loops = any(isinstance(each, ast.comprehension | ast.Await) for each in ast.walk(value))
    return not loops and all(isinstance(c.func, ast.Name) and c.func.id in _PLAIN_CALLS for c in calls)
