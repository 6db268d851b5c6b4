# SPDX-License-Identifier: Apache-2.0
"""Two hosts on this machine: network namespaces with addresses and hostnames of their own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launching import REPO

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PORT = 29400  # Nothing else listens in the namespace.
LAUNCH_SECONDS = 240  # A launch takes 20 to 40 on two busy cores.


def command(*words):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


@dataclass
class Launch:
    """The launcher of a host, and what it and its ranks have printed."""

    process: subprocess.Popen
    log: Path

    def end(self, seconds=LAUNCH_SECONDS):
        """Wait for the end and return the exit code."""
        return self.process.wait(seconds)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def errors(self):
        """The lines that the recipe printed, perhaps right after a progress bar.

        torchrun's report, which repeats them, is left out.
        """
        lines = self.output.replace("\r", "\n").splitlines()
        return [line for line in lines if "error: " in line and "traceback : " not in line]


@dataclass
class Host:
    """A network namespace with one address, and a hostname in it."""

    name: str
    space: str
    link: str
    address: str
    launches: list = field(default_factory=list)

    def start(self, words, log, first, environment):
        """Start torchrun on this host with one rank; `first` is the host where hosts meet."""
        meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{first.address}:{PORT}"]
        timeouts = "join_timeout=120,last_call_timeout=2"
        meet += ["--rdzv_id", log.parent.name]
        meet += ["--rdzv_conf", f"is_host={int(self is first)},{timeouts}"]
        torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc_per_node", 1, *meet]
        inside = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c"]
        inside += ['hostname "$0" && exec "$@"', self.name]
        whole = [*inside, *torchrun, "--local_addr", self.address, *words]
        variables = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"GLOO_SOCKET_IFNAME": self.link} | environment
        with open(log, "w") as file:
            process = subprocess.Popen(
                [str(word) for word in whole],
                env=variables,
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.launches.append(process)
        return Launch(process, log)

    def processes(self):
        return [int(word) for word in command("ip", "netns", "pids", self.space).stdout.split()]

    def kill(self):
        """Lose this host: all its processes at once."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self.launches:
            process.wait()

    def cut_off(self):
        """From now on packets of and to this host are lost without a word."""
        command("ip", "-n", self.space, "link", "set", self.link, "down")

    def connect(self):
        command("ip", "-n", self.space, "link", "set", self.link, "up")


def reason_to_skip():
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    probe = f"probe-{os.getpid()}"
    made = command("ip", "netns", "add", probe)
    command("ip", "netns", "delete", probe)
    return f"no network namespace can be made here: {made.stderr}" if made.returncode else None


@pytest.fixture(scope="session")
def network():
    """The two hosts, connected by a cable."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    number = os.getpid()
    hosts = []
    for i, letter in enumerate("ab", start=1):
        space = f"host-{letter}-{number}"
        hosts.append(Host(f"host-{letter}", space, f"v{letter}{number}", f"10.91.0.{i}"))
    a, b = hosts
    for host in hosts:
        command("ip", "netns", "add", host.space)
    peer = ["peer", "name", b.link, "netns", b.space]
    command("ip", "link", "add", a.link, "netns", a.space, "type", "veth", *peer)
    for host in hosts:
        command("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.link)
        command("ip", "-n", host.space, "link", "set", "lo", "up")
        host.connect()
    yield hosts
    for host in hosts:
        host.kill()
        command("ip", "netns", "delete", host.space)


@pytest.fixture
def hosts(network):
    """The two hosts, connected and with no process left by an earlier test."""
    for host in network:
        host.connect()
    yield network
    for host in network:
        host.kill()
