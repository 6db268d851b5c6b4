# SPDX-License-Identifier: Apache-2.0
"""Two hosts on this machine: network namespaces with addresses and hostnames of their own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

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
        """Start torchrun on this host with a rank; `first` is the host where hosts meet."""
        meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{first.address}:{PORT}"]
        timeouts = "join_timeout=120,last_call_timeout=2"
        meet += ["--rdzv_id", log.parent.name]
        meet += ["--rdzv_conf", f"is_host={int(self is first)},{timeouts}"]
        torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc_per_node", 1, *meet]
        return self.run([*torchrun, "--local_addr", self.address, *words], log, environment)

    def run(self, words, log, environment):
        """Start a command on this host."""
        inside = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c"]
        inside += ['hostname "$0" && exec "$@"', self.name]
        variables = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"GLOO_SOCKET_IFNAME": self.link} | environment
        with open(log, "w") as file:
            process = subprocess.Popen(
                [str(word) for word in (*inside, *words)],
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


def wait_until(is_so, seconds):
    """Wait until something is so, or fail."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < seconds, f"not within {seconds} s"
        time.sleep(0.1)


def reason_to_skip():
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    probe = f"probe-{os.getpid()}"
    made = command("ip", "netns", "add", probe)
    command("ip", "netns", "delete", probe)
    return f"no network namespace can be made here: {made.stderr}" if made.returncode else None
