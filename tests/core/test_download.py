"""A download is the file that was asked for, or an error that changes nothing on the disk."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake_lab.core.download import WrongContentError, download

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.close_connection = True
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/plain")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path == "/error":
            self.send_error(503)
            return
        if self.path == "/nonsense":
            self.wfile.write(b"SSH-2.0-server\r\n\r\n")
            return
        self.send_response(200)
        if self.path.startswith("/chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(CONTENT), CONTENT))
            self.wfile.write(b"0\r\n\r\n" if self.path == "/chunked" else b"ff\r\n")
            return
        if self.path != "/unannounced":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: -1 if self.path == "/short" else None])

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    """The address of a server on this machine, whose paths say how it answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """A machine's proxy does not know this server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize("path", ["plain", "moved", "chunked", "unannounced"])
def test_a_whole_answer_becomes_the_file(server, tmp_path, path):
    """However the server sends it, the content has the fingerprint, and nothing lies beside it."""
    file = tmp_path / "new" / "file"
    download(f"{server}/{path}", file, SHA256)
    assert file.read_bytes() == CONTENT
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("short", ConnectionError, "ended after 1,048,575 bytes, before the end of the file"),
        ("chunked_short", ConnectionError, "ended after 1,048,576 bytes, before the end"),
        ("error", ConnectionError, "503"),
        ("nonsense", ConnectionError, "SSH"),
        ("plain", WrongContentError, f"its SHA-256 is {SHA256}, not 00"),
    ],
)
def test_anything_else_leaves_what_was_there(server, tmp_path, path, error, said):
    """A short answer, an error, no HTTP or another content is an error that says which, and replaces nothing."""
    file = tmp_path / "file"
    file.write_bytes(b"before")
    with pytest.raises(error, match=said):
        download(f"{server}/{path}", file, "00" if path == "plain" else SHA256)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/file", "host/file", "http://[::1/file"])
def test_other_addresses_are_refused(tmp_path, address):
    """Only http and https are fetched from, and a malformed address is named."""
    with pytest.raises(ValueError, match="is not an address to fetch from"):
        download(address, tmp_path / "file", SHA256)
    assert not list(tmp_path.iterdir())


def test_progress_is_drawn_on_stderr(server, tmp_path, capsys):
    """The bar does not mix with results, which go to stdout."""
    download(f"{server}/plain", tmp_path / "file", SHA256, progress=True)
    shown = capsys.readouterr()
    assert "file" in shown.err
    assert not shown.out
