"""A small HTTP server that answers like a server with OpenAI's API, or badly in one way."""

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_S = 2e-4
"""Between two events: long enough that tokens come one after the other."""


@dataclass
class Double:
    """What the server does, and what it was asked. Mutable: it notes bodies."""

    forms: tuple = ("token ids", "text", "chat")
    options: tuple = ("return_token_ids", "min_tokens", "ignore_eos", "stream_options")
    says_usage: bool = True
    says_text: bool = True
    """Whether tokens have a text; a special token, or a part of a character, has none."""
    tokens_an_event: int = 1
    tokens_a_word: int = 2
    metrics: str = ""
    described: dict = field(default_factory=dict)
    lists: tuple = ("double",)
    """Its models."""
    fault: str | None = None
    """What goes wrong with completions, see `Handler.go_wrong`."""
    faults_from: int = 0
    """The first completion that goes wrong."""
    keeps_connections: bool = True
    """Whether a connection is open after an answer; if not, nothing in the answer says so."""
    resets: int = 0
    bodies: list = field(default_factory=list)
    url: str = ""

    def form_of(self, body):
        if "messages" in body:
            return "chat"
        return "text" if isinstance(body["prompt"], str) else "token ids"

    def length_of(self, body):
        form = self.form_of(body)
        if form == "token ids":
            return len(body["prompt"])
        text = body["messages"][0]["content"] if form == "chat" else body["prompt"]
        return 1 + self.tokens_a_word * len(text.split())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        double = self.server.double
        if self.path == "/v1/models":
            self.answer(
                200, {"object": "list", "data": [{"id": name, **double.described} for name in double.lists]}
            )
        elif self.path == "/metrics" and double.metrics:
            self.answer(200, double.metrics.encode(), "text/plain")
        else:
            self.answer(404, {"error": {"message": "no such route"}})

    def do_POST(self):
        double = self.server.double
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/reset_prefix_cache":
            double.resets += 1
            self.answer(200, b"")
            return
        double.bodies.append(body)
        unknown = [name for name in ("return_token_ids", "min_tokens", "ignore_eos", "stream_options")
                   if name in body and name not in double.options]  # fmt: skip
        if double.form_of(body) not in double.forms:
            self.answer(404, {"error": {"message": "no such route"}})
        elif unknown:
            self.answer(400, {"error": {"message": f"unknown option {unknown[0]}"}})
        elif double.fault and len(double.bodies) > double.faults_from:
            with contextlib.suppress(OSError):
                self.go_wrong(double.fault)
        else:
            with contextlib.suppress(OSError):
                self.stream(double, body)

    def go_wrong(self, fault):
        self.close_connection = True
        if fault == "500":
            self.answer(500, b"<h1>Internal Server Error</h1>", "text/html")
        elif fault == "html":
            self.answer(200, b"<p>hello</p>", "text/html")
        elif fault == "garbage":
            self.wfile.write(bytes(range(256)) * 40)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            said = {
                "no json": b"data: {]\n\n",
                "error": b'data: {"error": "out of memory"}\n\n',
                "list": b"data: []\n\n",
            }
            self.wfile.write(said.get(fault, b""))
            self.wfile.flush()
            if fault == "stall":
                self.server.stopping.wait(30)
            while fault == "drip" and not self.server.stopping.wait(0.02):
                self.wfile.write(b": \n\n")
                self.wfile.flush()

    def event(self, body):
        data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def stream(self, double, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        left = body["max_tokens"]
        while left:
            count = min(left, double.tokens_an_event)
            left -= count
            time.sleep(TOKEN_S * count)
            text = "a" * count if double.says_text else ""
            choice = {"index": 0, "delta": {"content": text}} if "messages" in body else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [97] * count
            self.event({"choices": [choice]})
        prompt = double.length_of(body)
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        if double.says_usage:
            self.event({"choices": [], "usage": usage})
        self.event(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        self.close_connection = not double.keeps_connections


@contextlib.contextmanager
def opened(**settings):
    """A server on loopback with these settings of a `Double`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.double = Double(**settings)
    server.stopping = threading.Event()
    server.double.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.double
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
