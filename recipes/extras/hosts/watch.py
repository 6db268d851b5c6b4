# SPDX-License-Identifier: Apache-2.0
"""Refuse what the hosts of a run do not have in common, and end when one no longer answers.

Without this a host that is lost is noticed after --ddp_timeout. The first rank of each host counts
up a number (its beats) in the store at MASTER_ADDR:MASTER_PORT, which all ranks have met at, and
reads those of the others. What counts is how long ago one changed, by the clock of the reader.
"""

import contextlib
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from core.checkpoint import gather
from core.exits import End, Exit
from core.extras import InRun
from core.stop import Status

# Containers may all have one name
NODE = f"{os.uname().nodename} ({os.environ.get('GROUP_RANK', '0')})"
# A process that reads or writes large files may keep its other threads waiting for seconds
SECONDS_OF_SILENCE = 30
SECONDS_BETWEEN_BEATS = 1
SECONDS_FOR_FILE = 10  # in which a network file system shows a new file to other hosts
LIBRARIES = (
    *("torch", "accelerate", "transformers", "datasets", "tokenizers", "peft", "deepspeed"),
    *("bitsandbytes", "safetensors", "numpy"),
)


class Hosts(InRun):
    """The hosts of one run; nothing is done if there is one."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._beats: Beats | None = None

    def joined(self, accelerator: Accelerator, group: Any, status: Status) -> None:
        """Compare the hosts, and begin to watch them. Every rank takes part.

        All ranks end with 64 if hosts differ in what they must share.
        """
        members = gather((NODE, facts_of(self._args)), group)
        leaders: dict[str, int] = {}
        for rank, (node, _) in enumerate(members):
            leaders.setdefault(node, rank)
        if len(leaders) == 1:
            return
        difference = find_difference(members)
        if difference is not None:
            raise End(Exit.USAGE, difference)
        folder = Path(self._args.output_dir)
        seen = [] if self._args.dry_run else gather((NODE, sees_marker(folder, group)), group)
        for node, is_seen in seen:
            if not is_seen:
                raise End(
                    Exit.USAGE,
                    f"--output_dir {folder} is not the same folder on {node} as on "
                    f"{members[0][0]}: pass one that all hosts share (NFS, Lustre, ...)",
                )
        attempt = gather(secrets.token_hex(8), group)[0]  # The store may be older than this one
        if accelerator.is_local_main_process:
            self._beats = Beats(leaders, attempt, status)

    def ended(self, is_done: bool) -> None:
        """Expect nothing of the other hosts any more. This one may take long to upload."""
        if self._beats is not None:
            self._beats.is_over = True


class Beats:
    """Two threads: one exchanges beats, in which a call may never return, and one looks at clocks.

    Attributes:
        is_over: whether nothing is expected of the other hosts any more.
    """

    def __init__(self, leaders: Mapping[str, int], attempt: str, status: Status) -> None:
        """Begin.

        Args:
            leaders: {host: its first rank}.
            attempt: a name for the keys of this attempt of the run.
            status: which records why the run fails.
        """
        self.is_over = False
        self._attempt = attempt
        self._status = status
        self._leader = leaders[NODE]
        self._others = {node: rank for node, rank in leaders.items() if node != NODE}
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, now)
        self._answered = now  # when the store last did
        threading.Thread(target=self._exchange, daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def _exchange(self) -> None:
        """Count the beats of this host, and read those of the others."""
        beats: dict[str, bytes] = {}
        with contextlib.suppress(RuntimeError):  # The host of the store is gone
            store = open_store(self._attempt)
            for number in range(sys.maxsize):
                store.set(f"beat/{self._leader}", str(number))
                for node, rank in self._others.items():
                    beat = store.get(f"beat/{rank}")
                    if beat != beats.get(node):
                        beats[node] = beat
                        self._heard[node] = time.monotonic()
                self._answered = time.monotonic()
                time.sleep(SECONDS_BETWEEN_BEATS)

    def _look(self) -> None:
        """End this rank, and by its launcher this host, when another host is silent."""
        while True:
            time.sleep(SECONDS_BETWEEN_BEATS)
            since = time.monotonic() - SECONDS_OF_SILENCE
            lost = [node for node, heard in self._heard.items() if heard < since]
            if self.is_over or not lost:
                continue
            where = " and ".join(lost)
            if self._answered < since:
                where += f", nor from the store at {os.environ['MASTER_ADDR']}"
            why = f"no answer for {SECONDS_OF_SILENCE} s from {where}"
            self._status.end(End(Exit.FAILED, why, is_alone=True))
            print(
                f"error: {why}: {NODE} ends; the same command continues from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def open_store(attempt: str) -> Any:
    """Return a connection of its own to the store: the process group's may be waiting in a call."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=SECONDS_OF_SILENCE),
    )
    return dist.PrefixStore(f"hosts/{attempt}", store)


def facts_of(args: Any) -> dict[str, str]:
    """Return what has to be the same on every host: versions, arguments, and the launched YAML."""
    facts = {"Python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    for name, value in vars(args).items():
        if name != "output_dir":  # Hosts may reach the same folder by other paths
            facts[f"--{name}"] = str(value)
    for name, value in os.environ.items():  # as accelerate launch hands a YAML to its ranks
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            facts[name] = value
    return facts


def find_difference(members: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """Return what differs between the first rank and another one, or None.

    Args:
        members: of each rank its host, and what `facts_of` returned there.
    """
    first_node, first = members[0]
    for node, facts in members:
        for name in {**first, **facts}:
            here, there = first.get(name, "not there"), facts.get(name, "not there")
            if here != there:
                return (
                    f"{name} is {here} on {first_node} and {there} on {node}: give all hosts the "
                    "same versions, command and --config_file"
                )
    return None


def sees_marker(folder: Path, group: Any) -> bool:
    """Return whether this rank sees a file that rank 0 writes into a folder. Every rank takes part.

    Nothing is left of it.
    """
    marker = folder / f".seen-{gather(secrets.token_hex(8), group)[0]}"
    is_writer = dist.get_rank() == 0
    if is_writer:
        marker.touch()
    gather(None, group)
    until = time.monotonic() + SECONDS_FOR_FILE
    while not (is_seen := marker.exists()) and time.monotonic() < until:
        time.sleep(0.2)
    gather(None, group)
    if is_writer:
        marker.unlink()
    return is_seen
