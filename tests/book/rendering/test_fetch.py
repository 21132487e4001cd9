"""`make book` fetches the traces that its pages are written for, whole and in time, or says why not."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from mooncake_lab.book.rendering import fetch
from mooncake_lab.book.rendering.fetch import fetch_book_traces
from mooncake_lab.workload import DATA_VARIABLE, RELEASES, releases

PATIENT_S = 600.0
"""For what has to come, however busy the machine is."""
ROOT = Path(__file__).parents[3]
CONTENTS = {name: f"{name}\n".encode() * 50_000 for name in ("conversation", "synthetic")}
FILES = {name: RELEASES[name].file_name for name in CONTENTS}


class _Handler(BaseHTTPRequestHandler):
    """Answers with the file, or as the server's `faults` say for its trace."""

    def do_GET(self):
        name = next(name for name in FILES if self.path.endswith(FILES[name]))
        self.server.asked.append(name)
        fault, body = self.server.faults.get(name), CONTENTS[name]
        if fault == "silent":
            self.server.over.wait()
            return
        if fault == "missing":
            self.send_error(404)
            return
        if fault == "wrong":
            body = body[:-2] + b"!\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "truncated":
            self.wfile.write(body[:1000])
        elif fault == "trickles":
            try:
                while not self.server.over.wait(0.05):
                    self.wfile.write(b"c")
            except OSError:  # the other side ended
                return
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def upstream(monkeypatch, tmp_path) -> Iterator[ThreadingHTTPServer]:
    """A server in place of the authors' repository, on a machine without traces."""
    changed = {
        name: replace(RELEASES[name], sha256=hashlib.sha256(content).hexdigest())
        for name, content in CONTENTS.items()
    }
    monkeypatch.setattr(releases, "RELEASES", MappingProxyType({**RELEASES, **changed}))
    monkeypatch.setattr(releases, "search_folders", lambda: (tmp_path / "traces",))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.asked, server.faults, server.over = [], {}, threading.Event()
        monkeypatch.setenv(releases.UPSTREAM_VARIABLE, f"http://127.0.0.1:{server.server_port}/mirror")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def impatient(monkeypatch, server) -> list[float]:
    """Let the limit be over as soon as the server was asked for what never comes; how long each wait could be."""
    waits: list[float] = []
    real = fetch.get_context("spawn")

    def pipe(*, duplex):
        told, telling = real.Pipe(duplex=duplex)

        def poll(timeout):
            waits.append(timeout)
            while True:
                over = any(server.faults.get(name) in {"silent", "trickles"} for name in server.asked)
                if told.poll(0.02):
                    return True
                if over:
                    return False

        return SimpleNamespace(poll=poll, recv_bytes=told.recv_bytes), telling

    monkeypatch.setattr(fetch, "get_context", lambda _: SimpleNamespace(Pipe=pipe, Process=real.Process))
    return waits


def left(folder: Path) -> dict[str, bytes]:
    """All that lies in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_both_are_fetched_once(upstream, tmp_path):
    """Whole files appear under the names that the search finds, one line says so, and nothing is tried again."""
    folder = tmp_path / "traces"
    assert fetch_book_traces(folder, limit_s=PATIENT_S) == f"conversation and synthetic fetched into {folder}"
    assert left(folder) == {FILES[name]: content for name, content in CONTENTS.items()}
    assert {path.name for path in folder.iterdir()} == {*FILES.values()}
    assert fetch_book_traces(folder, limit_s=PATIENT_S) is None
    assert upstream.asked == ["conversation", "synthetic"]


def test_only_the_missing_one_is_fetched(upstream, tmp_path):
    """A trace that is there already is not asked for, and stays as it is."""
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / FILES["conversation"]).write_text("of its owner")
    assert fetch_book_traces(folder, limit_s=PATIENT_S) == f"synthetic fetched into {folder}"
    assert upstream.asked == ["synthetic"]
    assert left(folder)[FILES["conversation"]] == b"of its owner"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "404"),
        ("wrong", "not the released file: its SHA-256 is another"),
        ("truncated", "the connection ended after"),
        ("silent", "not here after 17 s"),
        ("trickles", "not here after 17 s"),
    ],
)
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_what_does_not_come_whole_leaves_nothing(upstream, tmp_path, monkeypatch, fault, said, name):
    """The line names the trace and why; no part of a file stays; the other one is kept where it came in time."""
    upstream.faults[name] = fault
    folder = tmp_path / "traces"
    waits = fault in {"silent", "trickles"}
    if waits:
        impatient(monkeypatch, upstream)
    line = fetch_book_traces(folder, limit_s=fetch.LIMIT_S if waits else PATIENT_S)
    assert line is not None
    assert "\n" not in line
    others = [other for other in CONTENTS if other != name and not (waits and name == "conversation")]
    assert left(folder) == {FILES[other]: CONTENTS[other] for other in others}
    assert [path.name for path in folder.iterdir()] == [FILES[other] for other in others]
    assert said in line
    assert name in line
    assert line.endswith(": the book uses generated twins; OFFLINE=1 does not try")


def test_both_traces_share_one_limit(upstream, tmp_path, monkeypatch):
    """The time that the first one took is no longer there for the second, and all of it is less than 20 s."""
    upstream.faults["synthetic"] = "silent"
    waits = impatient(monkeypatch, upstream)
    said = fetch_book_traces(tmp_path / "traces")
    assert f"synthetic could not be fetched (not here after {fetch.LIMIT_S:.0f} s)" in said
    first, second = waits
    assert 20 > fetch.LIMIT_S >= first > second >= 0


def test_a_name_that_is_not_resolved(upstream, tmp_path, monkeypatch):
    """Without a network the line says so in the words of the system."""
    monkeypatch.setenv(releases.UPSTREAM_VARIABLE, "http://nowhere.invalid")
    line = fetch_book_traces(tmp_path / "traces", limit_s=PATIENT_S)
    assert line.startswith("conversation and synthetic could not be fetched (")
    assert "Max retries" not in line
    assert upstream.asked == []
    assert left(tmp_path / "traces") == {}


@pytest.mark.parametrize("address", ["ftp://host", "nonsense", "file:///etc"])
@pytest.mark.usefixtures("upstream")
def test_an_address_that_is_none(tmp_path, monkeypatch, address):
    """A mirror that cannot be asked is named with what is allowed."""
    monkeypatch.setenv(releases.UPSTREAM_VARIABLE, address)
    assert "allowed are http:// and https://" in fetch_book_traces(tmp_path / "traces", limit_s=PATIENT_S)


def test_nothing_is_tried_offline(upstream, tmp_path):
    """The line says which twins the book uses."""
    said = fetch_book_traces(tmp_path / "traces", offline=True)
    assert said == (
        "not fetched, because OFFLINE is set: the book uses generated twins of conversation and synthetic"
    )
    assert upstream.asked == []
    assert not (tmp_path / "traces").exists()


def test_nothing_is_tried_where_a_folder_is_named(upstream, tmp_path, monkeypatch):
    """Who names a folder decides which traces the book uses, also where it has none."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert fetch_book_traces(tmp_path / "traces", limit_s=PATIENT_S) is None
    assert upstream.asked == []


@pytest.mark.usefixtures("upstream")
def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    """The book is built all the same."""
    (tmp_path / "traces").write_text("a file")
    assert "File exists" in fetch_book_traces(tmp_path / "traces", limit_s=PATIENT_S)
    assert (tmp_path / "traces").read_text() == "a file"


@pytest.mark.usefixtures("upstream")
def test_an_interrupt_leaves_nothing(tmp_path):
    """Control-C while a server is silent ends the other process too, and no folder of parts stays."""
    folder = tmp_path / "traces"
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.asked, server.over = [], threading.Event()
        server.faults = dict.fromkeys(CONTENTS, "silent")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            releases.UPSTREAM_VARIABLE: f"http://127.0.0.1:{server.server_port}",
            "XDG_CACHE_HOME": str(tmp_path),
        }
        command = [sys.executable, "-m", "mooncake_lab.book.rendering.fetch", str(folder)]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE)
        while not server.asked:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(2)
        process.communicate()
        server.over.set()
        server.shutdown()
    assert list(folder.iterdir()) == []


def make(*arguments: str) -> str:
    """What make would run for these arguments, without running it."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in {"OFFLINE", "MAKEFLAGS"}}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("arguments", "offline"), [([], False), (["OFFLINE=1"], True), (["OFFLINE=0"], False)])
def test_make_book_tries_before_the_chapters(arguments, offline):
    """OFFLINE=1 is handed on; the chapters begin afterwards, also in a parallel make."""
    lines = make("book", "-j4", *arguments).splitlines()
    tried = next(i for i, line in enumerate(lines) if "mooncake_lab.book.rendering.fetch" in line)
    assert ("--offline" in lines[tried]) == offline
    assert tried < next(i for i, line in enumerate(lines) if "mooncake-lab batch" in line)


def test_make_traces_fetches_all_four():
    """Also those that the pages do not need, and the others when one fails."""
    (line,) = [line for line in make("traces").split("\n\n") if "trace fetch" in line]
    assert all(name in line for name in RELEASES)
    assert "|| failed=1" in line
