# SPDX-License-Identifier: Apache-2.0
"""A server in this process that answers every question with the same."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


def completion(**choice):
    """A chat completion as servers write it, with changes of its choice."""
    message = {"role": "assistant", "content": " a b"}
    choice = {"index": 0, "finish_reason": "stop", "message": message, **choice}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


class StandIn(BaseHTTPRequestHandler):
    """Answers every request with what its server was given, and keeps what it was asked."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.questions.append(json.loads(self.rfile.read(length)))
        self.answer(self.server.body)

    def do_GET(self):
        if self.server.models is None:
            self.answer(self.server.body)
        else:
            models = [{"id": name} for name in self.server.models]
            self.answer(json.dumps({"data": models}).encode())

    def answer(self, body):
        self.server.keys.append(self.headers["Authorization"])
        self.server.go_on.wait(10)
        self.send_response(self.server.status)
        if self.server.location is not None:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Print nothing."""


@contextlib.contextmanager
def serving():
    """A server: `status` and `body` are what it answers with, `models` the names that it lists.

    A `location` is where it redirects to.
    """
    server = HTTPServer(("127.0.0.1", 0), StandIn)
    server.status = 200
    server.body = json.dumps(completion()).encode()
    server.models = None
    server.location = None
    server.questions = []
    server.keys = []
    server.go_on = threading.Event()
    server.go_on.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
