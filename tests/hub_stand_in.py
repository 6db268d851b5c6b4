# SPDX-License-Identifier: Apache-2.0
"""A local stand-in of the hub's HTTP interface, as far as a push uses it."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CUT = "cut"  # The planted error that closes the connection without an answer


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

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files, self.stored, self.errors = {}, {}, {}
        self.created, self.commits, self.requests = [], [], []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def answer_to(self, path, body):
        """What the hub answers to a request: JSON, and a status if it is not 200."""
        if path.endswith("/whoami-v2"):
            return {"name": "owner", "type": "user", "orgs": []}
        if path.endswith("/validate-yaml"):
            return {"errors": [], "warnings": []}
        if path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            found = {"url": f"{self.url}/owner/name", "name": "owner/name", "id": "0"}
            return found, 409 if len(self.created) > 1 else 200
        if "/preupload/" in path:
            return {"files": [mode_of(file["path"]) for file in json.loads(body)["files"]]}
        if path.endswith("/info/lfs/objects/batch"):
            return {
                "transfer": "basic",
                "objects": list(map(self.offer, json.loads(body)["objects"])),
            }
        if path.startswith("/lfs/"):
            return self.store(path.removeprefix("/lfs/"), body)
        if "/commit/" in path:
            return self.commit(map(json.loads, body.splitlines()))
        return {"error": f"no such path: {path}"}, 404

    def offer(self, item):
        """The address of a large file, if it is not stored yet."""
        offer = {"oid": item["oid"], "size": item["size"]}
        if item["oid"] not in self.stored:
            offer["actions"] = {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}
        return offer

    def store(self, oid, body):
        """Keep a large file, if its hash is the one that was announced."""
        if hashlib.sha256(body).hexdigest() != oid:
            return {"error": "other bytes than announced"}, 400
        self.stored[oid] = body
        return {}

    def commit(self, entries):
        """Take over the files of a commit."""
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "header":
                self.commits.append(value)
            elif entry["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]
        sha = "0" * 40
        url = f"{self.url}/owner/name/commit/{sha}"
        return {"success": True, "commitOid": sha, "commitUrl": url}


def mode_of(path):
    """How the hub wants a file: weights are large ones."""
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


class Handler(BaseHTTPRequestHandler):
    """Answers one request: by the planted error of its path, or as the hub would."""

    def log_message(self, *_):
        """Print nothing."""

    def answer(self):
        hub = self.server
        hub.requests.append(f"{self.command} {self.path}")
        body = self.read_body()
        error = next((hub.errors[part] for part in hub.errors if part in self.path), None)
        if error == CUT:
            self.close_connection = True
            return
        found = (
            ({"error": "planted"}, error) if error else hub.answer_to(self.path.split("?")[0], body)
        )
        content, status = found if isinstance(found, tuple) else (found, 200)
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = answer  # noqa: N815  names of http.server

    def read_body(self):
        """The request's body, which may come in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body
