# SPDX-License-Identifier: Apache-2.0
"""A server that speaks S3, on this machine."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

SECONDS_TO_START = 60
USER = {"accessKey": "tester", "secretKey": "secret"}


class Server:
    """SeaweedFS: a master, a volume server, a filer and the API of S3, each on a port of its own.

    Attributes:
        url: of the API of S3.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
        self.url = f"http://127.0.0.1:{ports['s3']}"
        identity = {"name": "tester", "credentials": [USER], "actions": ["Admin"]}
        users = folder / "users.json"
        users.write_text(json.dumps({"identities": [identity]}))
        self._command = [
            *[program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.config={users}"],
            *["-master.volumeSizeLimitMB=64", "-volume.max=20", "-s3.port.iceberg=0"],
            "-s3.port.lance=0",
            *[f"-{part}.port={port}" for part, port in ports.items()],
        ]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, and return once it answers."""
        with open(self._folder / "log", "a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.HTTPError, OSError):
                urllib.request.urlopen(f"{self.url}/healthz", timeout=1)
                time.sleep(5)  # The filer learns of the volume server by a heartbeat.
                return
            time.sleep(0.5)
        raise TimeoutError((self._folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """End it; what it has stored stays."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def free_ports(number: int) -> list[int]:
    """Return ports that are free, as are those for gRPC 10,000 above them."""
    found = []
    for port in range(20_000 + os.getpid() % 5000, 40_000):
        if is_free(port) and is_free(port + 10_000):
            found.append(port)
        if len(found) == number:
            return found
    raise OSError("there are no free ports")


def is_free(port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind(("127.0.0.1", port))
        return True
    return False


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that is running; a test is skipped, with the reason, where there can be none."""
    program = shutil.which("weed") or shutil.which("weed", path=Path(sys.executable).parent)
    if program is None or importlib.util.find_spec("s3fs") is None:
        pytest.skip("make test-object-store installs s3fs and SeaweedFS, which are not here")
    server = Server(program, tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    """The environment of a user of this server, and the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", USER["secretKey"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    return server
