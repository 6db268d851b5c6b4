# SPDX-License-Identifier: Apache-2.0
"""A local stand-in of the hub's HTTP interface, as far as a push uses it."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = "cut"  # The planted error that closes the connection without an answer
SHA = "0" * 40  # All commits have it.


class Hub(ThreadingHTTPServer):
    """The stand-in, on a free port.

    Attributes:
        files: {path: content} of the one repository, as commits have left it.
        stored: {sha256: content} of large files.
        created: the bodies of the requests that create a repository.
        commits: the header of each commit, which has its message.
        requests: method and path of every request, in order.
        errors: {part of a path: a status, or CUT} that is answered there.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.errors: dict[str, int | str] = {}

    @property
    def url(self) -> str:
        """The address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer with the planted error of this path, if there is one, or as the hub would."""
        self.server.requests.append(f"{self.command} {self.path}")
        body = self.read_body()
        errors = self.server.errors.items()
        error = next((error for part, error in errors if part in self.path), None)
        if error is None:
            self.route(body)
        elif error == CUT:
            self.close_connection = True
        else:
            self.answer({"error": "planted"}, int(error))

    def read_body(self) -> bytes:
        """Return the request's body, which may come in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def route(self, body: bytes) -> None:
        """Answer a request as the hub would."""
        path = self.path.split("?")[0]
        if path.endswith("/whoami-v2"):
            self.answer({"name": "owner", "type": "user", "orgs": []})
        elif path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif path.endswith("/repos/create"):
            self.create(json.loads(body))
        elif "/preupload/" in path:
            self.choose_modes(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self.offer_uploads(json.loads(body))
        elif path.startswith("/lfs/"):
            self.store(path.removeprefix("/lfs/"), body)
        elif "/commit/" in path:
            self.commit(body)
        else:
            self.answer({"error": f"no such path: {path}"}, 404)

    def create(self, body: dict[str, Any]) -> None:
        """Create the repository; 409 if it is there, as the hub answers."""
        self.server.created.append(body)
        url = f"{self.server.url}/owner/name"
        status = 409 if len(self.server.created) > 1 else 200
        self.answer({"url": url, "name": "owner/name", "id": "0"}, status)

    def choose_modes(self, body: dict[str, Any]) -> None:
        """Say that weights are large files."""
        files = []
        for file in body["files"]:
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        self.answer({"files": files})

    def offer_uploads(self, body: dict[str, Any]) -> None:
        """Give the address of each large file that is not stored yet."""
        objects = []
        for item in body["objects"]:
            offer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.stored:
                offer["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{item['oid']}"}}
            objects.append(offer)
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, oid: str, body: bytes) -> None:
        """Keep a large file, if its hash is the one that was announced."""
        if hashlib.sha256(body).hexdigest() != oid:
            self.answer({"error": "other bytes than announced"}, 400)
            return
        self.server.stored[oid] = body
        self.answer({})

    def commit(self, body: bytes) -> None:
        """Take over the files of a commit, which has one JSON object on each line."""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append(value)
            elif entry["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
        url = f"{self.server.url}/owner/name/commit/{SHA}"
        self.answer({"success": True, "commitOid": SHA, "commitUrl": url})

    def answer(self, body: Any, status: int = 200) -> None:
        """Send JSON."""
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


for method in ("POST", "PUT"):
    setattr(Handler, f"do_{method}", Handler.do_GET)
