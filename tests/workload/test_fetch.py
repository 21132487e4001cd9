"""Fetching a released trace, from a server on loopback that behaves well or badly."""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import MappingProxyType

import pytest

from mooncake_lab.workload import RELEASES, WORKLOADS, fetch_trace, releases

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
    @pytest.mark.parametrize("path", ["truncated", "missing"])
    def test_nothing_usable_came(self, server, tmp_path, path):
        """An answer cut short or an error answer is a clear error that leaves nothing behind."""
        with pytest.raises(ConnectionError, match=f"could not fetch http://127.0.0.1:.*/{path}"):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, path))
        assert list(tmp_path.iterdir()) == []

    def test_wrong_content(self, server, tmp_path):
        """Content with another digest is refused and not kept."""
        with pytest.raises(ValueError, match="not the released synthetic trace and was not kept"):
            fetch_trace("synthetic", folder=tmp_path, url=address(server, "wrong"))
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

    @pytest.mark.parametrize("url", ["synthetic.jsonl", "ftp://host/file", "folder/file"])
    def test_no_address(self, tmp_path, url):
        """What is no web address is refused as such, and not blamed on a server."""
        with pytest.raises(ValueError, match=f"'{url}' is not an address to fetch from"):
            fetch_trace("synthetic", folder=tmp_path, url=url)

    def test_the_folder_cannot_be_made(self, server, tmp_path):
        """A folder that cannot be made is named, and not blamed on the network."""
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file") as found:
            fetch_trace("synthetic", folder=tmp_path / "file" / "traces", url=address(server, "ok"))
        assert not isinstance(found.value, ConnectionError)
        assert server.requests == 0

    def test_unknown_workload(self):
        """A name that is no workload is refused with those that are."""
        with pytest.raises(ValueError, match=f"unknown workload 'azure'; allowed are {', '.join(WORKLOADS)}"):
            fetch_trace("azure")


class TestReleases:
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_are_pinned(self, name):
        """Every release has an address at a commit and a digest of full length."""
        release = RELEASES[name]
        assert release.name == name
        assert len(bytes.fromhex(release.sha256)) == 32
        assert len(bytes.fromhex(release.commit)) == 20
        assert release.url.startswith(f"https://raw.githubusercontent.com/kvcache-ai/Mooncake/{release.commit}/")
        assert release.url.endswith(".jsonl")
