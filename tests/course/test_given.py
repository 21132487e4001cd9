"""A submission gets types and views of the package, and none of its answers; honest imports cost nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from submissions import SOURCES, hand_in, needs_confinement

import mooncake_lab
from mooncake_lab.batching import BATCHING_POLICIES
from mooncake_lab.conductor import ADMISSION_POLICIES, PLACEMENT_POLICIES
from mooncake_lab.course.grading import confine
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.given import GIVEN
from mooncake_lab.course.grading.grade import grade
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.store import EVICTION_POLICIES

PATIENT = Allowance(reply_s=60, wall_s=600)
PACKAGE = Path(mooncake_lab.__file__).parent
ROOT = PACKAGE.parent


def policies() -> list[type]:
    """The class of every policy in a registry."""
    made = [make(8) for make in EVICTION_POLICIES.values()]
    made += [make() for registry in (BATCHING_POLICIES, PLACEMENT_POLICIES) for make in registry.values()]
    made += [make() if callable(make) else make for make in ADMISSION_POLICIES.values()]
    return sorted({type(each) for each in made}, key=lambda each: (each.__module__, each.__name__))


def test_no_registered_policy_is_given():
    """What a submission gets defines no policy of the registries and no class that one inherits from."""
    assert len(policies()) > 20
    assert not {kind.__module__ for each in policies() for kind in each.__mro__} & {*GIVEN}


def submit(code: str) -> Submission:
    """A confined process that has executed one cell."""
    return Submission([Code("one", code)], PATIENT)


LOOKS = """
import gc, importlib, inspect, linecache, os, sys
def opened(paths):
    found = []
    for path in paths:
        try:
            found.append(open(path, "rb").read(1) and path)
        except OSError:
            pass
    return found
def imported(root, names):
    found = []
    sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "names")]
    sys.path.insert(0, root)
    for name in [each for each in sys.modules if each.startswith("mooncake_lab")]:
        del sys.modules[name]
    for name in names:
        try:
            found.append(importlib.import_module(name).__file__)
        except (ImportError, OSError):
            pass
    return found
def loaded():
    kinds = [each for each in gc.get_objects() if isinstance(each, type) or inspect.isfunction(each)]
    return sorted({str(each.__module__) for each in kinds if str(each.__module__).startswith("mooncake_lab.")})
def lines(paths):
    return [path for path in paths if linecache.getlines(path)]
"""


@needs_confinement
def test_no_answer_is_in_the_process_or_can_be_read():
    """No file of the package, the notebooks, the tests or the history can be read, and no answer is loaded."""
    files = [str(path) for path in PACKAGE.rglob("*") if path.suffix in {".py", ".pyc", ".so"}]
    files += [str(path) for folder in ("notebooks", "tests", "data") for path in (ROOT / folder).rglob("*.*")]
    files += [str(path) for path in ((ROOT / ".git").rglob("*") if (ROOT / ".git").is_dir() else ())][:2000]
    answers = [each.__module__ for each in policies()]
    with submit(LOOKS) as submission:
        assert submission.failed_cells == ()
        for start in range(0, len(files), 1000):
            assert submission.call("opened", files[start : start + 1000]) == []
        assert submission.call("lines", files[:50]) == []
        assert set(submission.call("loaded")) <= {
            *GIVEN,
            "mooncake_lab.course",
            "mooncake_lab.course.grading.given",
        }
        assert submission.call("imported", str(ROOT), answers) == []


@needs_confinement
def test_what_is_given_needs_nothing_that_is_withheld():
    """No module that a submission gets holds a stand-in."""
    code = (
        "import sys\n"
        "def held():\n"
        "    from mooncake_lab.course.grading.given import Quiet, Withheld\n"
        "    modules = [m for m in sys.modules.values() if m.__name__.startswith('mooncake_lab.')]\n"
        "    return [f'{m.__name__}.{n}' for m in modules for n, v in vars(m).items()"
        " if hasattr(m, '__file__') and type(v) in (Quiet, Withheld)]"
    )
    with submit(code) as submission:
        assert submission.call("held") == []


@needs_confinement
def test_a_policy_that_is_added_later_is_withheld_too(tmp_path):
    """A policy that is added to a registry, in a new file, is looked for in vain."""
    package = tmp_path / "site" / "mooncake_lab"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "static"))
    (tmp_path / "site" / "data").symlink_to(ROOT / "data")
    (package / "store" / "eviction" / "newest.py").write_text("class Newest:\n    secret = 'the answer'\n")
    registry = package / "store" / "eviction" / "__init__.py"
    text = registry.read_text().replace(
        '        "arc": ARC,\n', '        "arc": ARC,\n        "newest": lambda _: Newest(),\n'
    )
    registry.write_text(f"from mooncake_lab.store.eviction.newest import Newest\n{text}")
    cell = (
        "import importlib, os, sys\n"
        "import mooncake_lab.store.eviction.newest as newest\n"
        "from mooncake_lab.store.eviction import Newest\n"
        "from mooncake_lab.store import EVICTION_POLICIES\n"
        "looks = dict(\n"
        "    attribute=lambda: newest.Newest.secret, name=lambda: Newest.secret,\n"
        "    registry=lambda: EVICTION_POLICIES['newest'](8).secret,\n"
        f"    file=lambda: open({str(package / 'store/eviction/newest.py')!r}).read(),\n"
        f"    folder=lambda: os.listdir({str(package)!r}),\n"
        ")\n"
        "def look():\n"
        "    said = {}\n"
        "    for name, each in looks.items():\n"
        "        try:\n"
        "            said[name] = str(each())\n"
        "        except Exception as error:\n"
        "            said[name] = type(error).__name__\n"
        "    return said\n"
    )
    code = (
        "from mooncake_lab.course.grading.messages import Code\n"
        "from mooncake_lab.course.grading.remote import Submission\n"
        "from mooncake_lab.store import EVICTION_POLICIES\n"
        "assert EVICTION_POLICIES['newest'](8).secret == 'the answer'\n"
        f"with Submission([Code('one', {cell!r})]) as one:\n"
        "    print(one.failed_cells, sorted(set(one.call('look').items())))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    # without -P and from elsewhere, so that the copy comes first
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    withheld = [("attribute", "WithheldError"), ("file", "PermissionError"), ("folder", "PermissionError")]
    assert done.stdout.strip() == str(((), [*withheld, ("name", "WithheldError"), ("registry", "WithheldError")]))[
        1:-1
    ].replace("(), ", "() ", 1), done.stderr


TRICKS = {
    "attrgetter": """
from operator import attrgetter
from mooncake_lab.conductor import select_decode
found = attrgetter("place.__globals__")(type("X", (), {"place": select_decode}))["KVCacheCentric"]
""",
    "annotation": """
from typing import get_type_hints
from mooncake_lab.store import EVICTION_POLICIES
def f(x: "EVICTION_POLICIES['lru'](1)"): ...
found = get_type_hints(f)["x"]
""",
    "vars(sys)": """
import sys
found = vars(sys)["mod" + "ules"]["mooncake_lab.store.eviction"].LRU()
""",
    "match": """
import sys
match sys:
    case object(modules=x):
        found = x["mooncake_lab.core"].block_keys([1], 1)
""",
    "timeit": """
import timeit
names = {}
taken = "from mooncake_lab.store.eviction import LRU; names['found'] = LRU()"
timeit.timeit(taken, number=1, globals={"names": names})
found = names["found"]
""",
    "subclass": "from mooncake_lab.store.eviction import LRU\nclass found(LRU): pass",
    "isinstance": "from mooncake_lab.store.eviction.arc import ARC\nfound = isinstance(1, ARC)",
    "gc": """
import gc
answers = ("LRU", "KVCacheCentric", "block_keys")
code = [each for each in gc.get_objects() if isinstance(each, (type, type(lambda: 0)))]
found = next(each for each in code if each.__name__ in answers)
""",
    "source": "import inspect, mooncake_lab.store.eviction.lru as m\nfound = inspect.getsource(m)",
    "loader": """
import sys
from importlib.machinery import PathFinder
import mooncake_lab
spec = PathFinder.find_spec("mooncake_lab.core.keys", [mooncake_lab.__path__[0] + "/core"])
found = spec.loader.get_source("mooncake_lab.core.keys")
""",
}  # fmt: skip


@needs_confinement
@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_finds_an_answer(trick):
    """Ways around an import find nothing, because nothing is there."""
    with submit(f"def answer():\n    return repr(found)\n{TRICKS[trick]}") as submission:
        assert len(submission.failed_cells) == 1
        with pytest.raises(SubmissionError, match="found"):
            submission.call("answer")


@needs_confinement
@pytest.mark.parametrize("name", ["core.block_keys", "store.eviction.LRU", "batching.SarathiServe"])
def test_what_is_withheld_is_named(name):
    """Using a withheld name says which, and what is allowed."""
    package, _, what = name.rpartition(".")
    with submit(f"from mooncake_lab.{package} import {what}\ndef f():\n    return {what}()") as submission:
        assert submission.failed_cells == ()
        with pytest.raises(SubmissionError, match=f"WithheldError: mooncake_lab.{name} is not available"):
            submission.call("f")


HONEST = {
    "keys, pickled": (
        "keys",
        {"hashlib.sha256(key + repr(tokens[start : start + block_tokens]).encode()).digest()":
         "__import__('hashlib').sha256(pickle.dumps((key, tuple(tokens[start : start + block_tokens])))).digest()",
         "def chain_keys": "import pickle\nfrom mooncake_lab.core import BlockKey, block_keys\n\ndef chain_keys"},
    ),
    "keys, marshalled": (
        "keys",
        {"key + repr(tokens[start : start + block_tokens]).encode()":
         "key + marshal.dumps(tokens[start : start + block_tokens])",
         "def chain_keys": "import marshal\n\ndef chain_keys"},
    ),
    "keys of a class": (
        "keys",
        {"key + repr(tokens[start": "pickle.dumps(Block(key)) + repr(tokens[start",
         "def chain_keys": "import pickle\nfrom dataclasses import dataclass\nfrom typing import get_type_hints\n"
         "\n@dataclass\nclass Block:\n    key: 'bytes'\n    next: 'Block | None' = None\n\n"
         "assert get_type_hints(Block)['next'] == Block | None\n\ndef chain_keys"},
    ),
    "eviction with hints": (
        "eviction",
        {"self.ghosts": "self.gc",
         "class MyPolicy:": "import gc\nfrom mooncake_lab.store import EvictionPolicy, PolicyFactory\n"
         "from mooncake_lab.store import EVICTION_POLICIES\nfrom mooncake_lab.store.eviction import LRU\n"
         "from mooncake_lab.core import BlockKey\n"
         "Held = dict[BlockKey, LRU | None]\nOther = LRU | EvictionPolicy | None\n\nclass MyPolicy:",
         "            for key in queue:\n                if key not in spared:":
         "            for key in [each for each in queue if each in queue.keys() - spared]:\n"
         "                if True:"},
    ),
    "admission with hints": (
        "admission",
        {"@dataclass(frozen=True)": "from mooncake_lab.core import Request, SLO\n"
         "from mooncake_lab.conductor import ClusterView, Decision, DecodeView, Estimator, Placement\n"
         "from mooncake_lab.conductor import AdmissionPolicy, EarlyRejection\n\n@dataclass(frozen=True)",
         "def admit(self, request, proposed, view, *, estimate, slo):":
         "def admit(self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator,"
         " slo: SLO) -> Decision | EarlyRejection:"},
    ),
    "chunked with hints": (
        "chunked",
        {"class MyChunking:": "from mooncake_lab.batching import BatchingPolicy, VLLM\n"
         "print(trace_plans, Progress)\n\nclass MyChunking:",
         "def plan(self, waiting, running, limits):":
         "def plan(self, waiting: tuple[Progress, ...], running: tuple[Progress, ...], limits: Limits) -> Plan:"},
    ),
    "placement from the old place": (
        "placement",
        {"class MyPlacement:": "from mooncake_lab.conductor.placement import select_decode\n"
         "from mooncake_lab.perf import LatencyModel\n"
         "assert isinstance(paper_node_latency(), LatencyModel)\n\nclass MyPlacement:"},
    ),
    "eviction, tried in its cell": (
        "eviction",
        {"class MyPolicy:": "class Mine:",
         "return key in self.once or key in self.often": "return key in self.once or key in self.often\n\n"
         "report = check_policy(Mine, chats_and_documents(7))\nprint(report, f'{report.hit_rate:.3f}')\n"
         "assert report.passed and report.hit_rate > report.lru_hit_rate\n\nclass MyPolicy(Mine):\n    pass"},
    ),
}  # fmt: skip


@needs_confinement
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_gets_its_points(name, tmp_path):
    """Modules of the standard library, imports for type hints and the checks of the notebook cost nothing."""
    topic, changes = HONEST[name]
    path = hand_in(tmp_path, topic, changes=changes)
    found = grade(path, SOURCES / f"{topic}.ipynb", student="one", seed=5, allowance=PATIENT)
    assert found.earned == 10, [mark.said for mark in found.marks]


def test_copies_are_withheld(tmp_path, monkeypatch):
    """Beside what is withheld in a folder of packages everything can be read, and of that only the names."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("numpy", "mooncake_lab", "mooncake_lab-0.1.0.dist-info", "Mooncake-Lab-0.1.0"):
        (site / name).mkdir(parents=True)
    (site / "mooncake_lab-0.1.0.whl").touch()
    (site / "six.py").touch()
    monkeypatch.setattr(confine, "_python_roots", lambda: [tmp_path / "lib"])
    monkeypatch.setattr(confine, "_SETTINGS", ())
    found = {path: access for path, access in confine.readable().items() if path.is_relative_to(tmp_path)}
    names = confine._READ_FOLDER
    assert found == {
        tmp_path / "lib": names,
        tmp_path / "lib" / "python3.11": names,
        site: names,
        site / "numpy": confine._READ,
        site / "six.py": confine._READ_FILE,
    }


@pytest.mark.parametrize("checkout", [True, False])
def test_a_project_within_what_is_readable_is_withheld(tmp_path, monkeypatch, checkout):
    """A checkout below a readable folder is withheld with notebooks and history, but for its environment."""
    project = tmp_path / "lib" / "project"
    module = project / "mooncake_lab" / "course" / "grading" / "confine.py"
    for path in (module, project / ".git" / "HEAD", project / ".venv" / "lib" / "x.py", tmp_path / "lib" / "y.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if checkout:
        (project / "pyproject.toml").touch()
    monkeypatch.setattr(confine, "__file__", str(module))
    monkeypatch.setattr(confine, "_python_roots", lambda: [tmp_path / "lib", project / ".venv" / "lib"])
    found = [path for path, access in confine.readable().items() if access & confine._READ_FILE]
    assert not [path for path in found if module.is_relative_to(path)]
    assert any((project / ".venv" / "lib" / "x.py").is_relative_to(path) for path in found)
    assert any((tmp_path / "lib" / "y.py").is_relative_to(path) for path in found)
    assert any((project / ".git").is_relative_to(path) for path in found) != checkout
