# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster on this machine: munge, a controller, and two nodes with a GPU each, on paper.

Every daemon has a host name and an /etc/hosts of its own, in namespaces, so that what runs on the
two nodes takes itself to be on two hosts. All other resources are shared.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ranks import free_ports

PATIENCE = 120  # seconds
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
CONFIG = """\
ClusterName=test
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
# What works in a container without control groups and without a data base
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=1
SlurmdTimeout=10
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,batch_sched_delay=1
NodeName=n0 NodeAddr=127.0.0.1 Port={first} CPUs=8 RealMemory=1000 Gres=gpu:1 State=UNKNOWN
NodeName=n1 NodeAddr=127.0.0.1 Port={second} CPUs=8 RealMemory=1000 Gres=gpu:1 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 OverSubscribe=FORCE:4
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""
HOSTS = "127.0.0.1 localhost controller n0 n1\n"


def why_not():
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "this container may not make namespaces (unshare --uts --mount)"
    return None


class Cluster:
    """The daemons, and the commands that talk to them.

    Args:
        folder: what the daemons write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        folder.mkdir(parents=True)
        folder.chmod(0o755)  # munge's client refuses a socket in a folder that it cannot enter
        (folder / "state").mkdir()
        controller, first, second = free_ports(3)
        text = CONFIG.format(folder=folder, controller=controller, first=first, second=second)
        (folder / "slurm.conf").write_text(text)
        nodes = "\n".join(f"NodeName={name} Name=gpu File=/dev/null" for name in ("n0", "n1"))
        (folder / "gres.conf").write_text(nodes + "\n")
        (folder / "hosts").write_text(HOSTS)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        words = ["munged", "--foreground", "--force", f"--key-file={key}"]
        words += [f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munge.pid"]
        words += [f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"]
        self._start("munge", words)
        self.wait_until(lambda: (self.folder / "munge.socket").exists(), "munge")
        self._start("controller", self._on_host("controller", "slurmctld -D"))
        for node in ("n0", "n1"):
            self.start_node(node)
        self.wait_until(lambda: self.states() == ["idle", "idle"], "the nodes")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start(name, self._on_host(name, f"slurmd -D -N {name}"))

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.run("scancel", "--user=root", check=False)
        with contextlib.suppress(TimeoutError):
            self.wait_until(lambda: self.run("squeue", "--noheader", check=False) == "", "jobs")
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            process.wait(30)

    def run(self, *words, check: bool = True, **options) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | options.pop("environment", {}),
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{words}: {done.stderr}")
        return done.stdout.strip()

    def states(self) -> list[str]:
        """The state of each node."""
        return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False).split()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows about a job."""
        text = self.run("scontrol", "show", "job", number)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for_state(self, number: str, states: tuple[str, ...], seconds: float) -> str:
        """Wait until a job is in one of these states, and return it."""
        self.wait_until(lambda: self.job(number)["JobState"] in states, f"job {number}", seconds)
        return self.job(number)["JobState"]

    def _on_host(self, name: str, daemon: str) -> list[str]:
        script = f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; exec {daemon}"
        return ["unshare", "--uts", "--mount", "bash", "-c", script]

    def _start(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.output").open("a") as output:
            self.daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait_until(
        self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE
    ) -> None:
        """Wait until a condition holds; a TimeoutError says what did not happen."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not ready after {seconds} s; see {self.folder}")
            time.sleep(0.5)
