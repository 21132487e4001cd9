"""Released traces are fetched whole or not at all, found, and loaded, or their twins are."""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import MappingProxyType

import pytest
from missing_here import RELEASED

from mooncake_lab.workload import (
    DATA_VARIABLE,
    RELEASES,
    WORKLOADS,
    fetch_trace,
    find_trace,
    load,
    releases,
    search_folders,
)
from mooncake_lab.workload import releases as locate


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The three places searched, in order, all empty."""
    places = [tmp_path / "named", tmp_path / "checkout" / "data" / "traces", tmp_path / "cache"]
    for place in places:
        place.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").touch()
    monkeypatch.setenv(DATA_VARIABLE, str(places[0]))
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "checkout" / "package" / "workload" / "locate.py"))
    monkeypatch.setattr(locate, "cache_folder", lambda: places[2])
    return places


class TestFind:
    @pytest.mark.parametrize("first", [0, 1, 2])
    def test_order(self, folders, first):
        """The first place that has the file wins: the variable, the checkout, the cache."""
        for folder in folders[first:]:
            (folder / "mooncake_trace.jsonl").touch()
        assert find_trace("arxiv") == folders[first] / "mooncake_trace.jsonl"

    def test_nowhere(self, folders):
        """A file that is nowhere is None."""
        assert search_folders() == tuple(folders)
        assert find_trace("conversation") is None

    def test_without_variable_and_checkout(self, folders, monkeypatch):
        """An installed package without the variable searches only the cache."""
        monkeypatch.delenv(DATA_VARIABLE)
        (folders[1].parents[1] / "pyproject.toml").unlink()
        assert search_folders() == (folders[2],)


class TestLoad:
    @pytest.mark.usefixtures("folders")
    def test_the_twin_where_nothing_is_found(self):
        """Without a file it is the twin of the seed, and says so."""
        trace = load("conversation", seed=3)
        assert (trace.name, trace.origin) == ("conversation", "twin")
        assert trace.source.startswith("twin of the conversation trace, seed 3")

    def test_another_file_of_that_name_is_refused(self, folders):
        """A file that is not the released one is an error, not a quiet substitute."""
        (folders[0] / "conversation_trace.jsonl").write_text("{}")
        with pytest.raises(ValueError, match=r"conversation_trace\.jsonl has the SHA-256"):
            load("conversation")

    @pytest.mark.parametrize("name", RELEASED)
    def test_the_released_file(self, name):
        """A released file is recognised, and says so, whatever the seed."""
        trace = load(name, seed=9)
        assert (trace.name, trace.origin, trace.source) == (name, "released", f"released {name} trace")


CONTENT = b'{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [0]}\n' * 500
FILE_NAME = RELEASES["synthetic"].file_name


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        if self.path == "/missing":
            self.send_error(404)
            return
        body = CONTENT if self.path != "/wrong" else CONTENT[:-2] + b"!\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1000] if self.path == "/truncated" else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server whose paths say how it misbehaves; the synthetic release is what it serves when it does not."""
    release = replace(RELEASES["synthetic"], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(releases, "RELEASES", MappingProxyType({**RELEASES, "synthetic": release}))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        httpd.requests = 0
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def address(server, path):
    return f"http://127.0.0.1:{server.server_port}/{path}"


class TestGood:
    def test_puts_the_file_there_and_only_it(self, server, tmp_path):
        """A good answer becomes the file, in a folder made for it, with nothing beside it."""
        folder = tmp_path / "new" / "traces"
        path = fetch_trace("synthetic", folder=folder, url=address(server, "ok"))
        assert path == folder / FILE_NAME
        assert path.read_bytes() == CONTENT
        assert list(folder.iterdir()) == [path]

    def test_does_not_fetch_twice(self, server, tmp_path):
        """A right file that is already there is kept without asking the server."""
        for _ in range(2):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, "ok"))
        assert server.requests == 1

    def test_force_replaces(self, server, tmp_path):
        """With force, a file that is not the released one is replaced."""
        (tmp_path / FILE_NAME).write_text("something else")
        path = fetch_trace("synthetic", folder=tmp_path, url=address(server, "ok"), force=True)
        assert path.read_bytes() == CONTENT


class TestBad:
    @pytest.mark.parametrize(
        ("path", "error", "said"),
        [
            ("truncated", ConnectionError, "could not fetch http://127.0.0.1:.*/truncated"),
            ("missing", ConnectionError, "could not fetch http://127.0.0.1:.*/missing"),
            ("wrong", ValueError, "not the released synthetic trace and was not kept"),
        ],
    )
    def test_nothing_usable_came(self, server, tmp_path, path, error, said):
        """An answer cut short, an error answer or other content is an error that leaves nothing behind."""
        with pytest.raises(error, match=said):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, path))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("path", ["truncated", "wrong", "missing"])
    def test_a_failed_replacement_changes_nothing(self, server, tmp_path, path):
        """When a forced fetch fails, the file that was there stays as it was."""
        old = tmp_path / FILE_NAME
        old.write_text("something else")
        with pytest.raises((ConnectionError, ValueError)):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, path), force=True)
        assert old.read_text() == "something else"
        assert list(tmp_path.iterdir()) == [old]

    @pytest.mark.usefixtures("server")
    def test_nobody_listens(self, tmp_path):
        """A server that cannot be reached is a clear error that says what else to do."""
        closed = HTTPServer(("127.0.0.1", 0), _Handler)
        closed.server_close()
        with pytest.raises(ConnectionError, match="MOONCAKE_LAB_DATA"):
            fetch_trace("synthetic", folder=tmp_path, url=address(closed, "ok"))

    def test_another_file_is_in_the_way(self, server, tmp_path):
        """Without force, a file of that name with other content is an error, and stays."""
        (tmp_path / FILE_NAME).write_text("something else")
        with pytest.raises(ValueError, match="remove the file and fetch it again"):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, "ok"))
        assert (tmp_path / FILE_NAME).read_text() == "something else"
        assert server.requests == 0

    def test_no_address(self, tmp_path):
        """What is no web address is refused as such, and not blamed on a server."""
        with pytest.raises(ValueError, match="is not an address to fetch from"):
            fetch_trace("synthetic", folder=tmp_path, url="ftp://host/file")

    def test_the_folder_cannot_be_made(self, server, tmp_path):
        """A folder that cannot be made is named, and not blamed on the network."""
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file") as found:
            fetch_trace("synthetic", folder=tmp_path / "file" / "traces", url=address(server, "ok"))
        assert not isinstance(found.value, ConnectionError)
        assert server.requests == 0

    @pytest.mark.parametrize("use", [fetch_trace, find_trace, load])
    def test_unknown_workload(self, use):
        """A name that is no workload is refused with those that are."""
        with pytest.raises(ValueError, match=f"unknown workload 'azure'; allowed are {', '.join(WORKLOADS)}"):
            use("azure")


class TestReleases:
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_are_pinned(self, name):
        """Every release has an address at a commit and a digest of full length."""
        release = RELEASES[name]
        commit, *_ = release.path.split("/")
        assert release.name == name
        assert len(bytes.fromhex(release.sha256)) == 32
        assert len(bytes.fromhex(commit)) == 20
        assert release.url.startswith(f"https://raw.githubusercontent.com/kvcache-ai/Mooncake/{commit}/")
        assert release.url.endswith(".jsonl")


def test_a_mistyped_folder_is_an_error(monkeypatch, tmp_path):
    """Else twins would take the place of the traces that the user has; an empty value names none."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "mistyped"))
    with pytest.raises(ValueError, match="mistyped, which is no folder"):
        find_trace("conversation")
    monkeypatch.setenv(DATA_VARIABLE, "")
    find_trace("conversation")
