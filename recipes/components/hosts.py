# SPDX-License-Identifier: Apache-2.0
"""The other hosts of a run: whether they still answer, and why their ranks have ended.

watch.py sees the processes of its own host. If another host is lost, or the network between them
drops packets without a word, a collective call would wait for `--ddp_timeout`. The hosts therefore
count up numbers ("beats") in the store at MASTER_ADDR:MASTER_PORT, which every rank has reached
when the process group was made. What counts is how long ago a number last changed, by the clock of
the host that reads it, so that the clocks of hosts need not agree. A rank that ends tells the other
hosts why, through the same store.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from components.status import HOST, RANK, Ending, Status

SECONDS_BETWEEN_BEATS = 1
# A host without a new beat for so long is lost. A process that reads or writes large files may keep
# its other threads waiting for seconds.
SECONDS_OF_SILENCE = 30
SECONDS_AFTER_A_BROKEN_CONNECTION = 10  # The same, once a connection between hosts has broken.
SECONDS_TO_TELL = 5  # A rank that ends waits so long until every other host has read why.
END = "end"


@dataclass
class Host:
    """A host of the run.

    Attributes:
        name: its hostname.
        ranks: the ranks on it; the first one counts its beats.
        has_store: whether the store, through which the hosts watch each other, is on it.
        beat: the last one that was read: a number, and the step in which the host was then.
        heard: when that was first read, in seconds of time.monotonic().
    """

    name: str
    ranks: list[int] = field(default_factory=list)
    has_store: bool = False
    beat: str = ""
    heard: float = 0.0

    @property
    def leader(self) -> int:
        """The rank that counts the beats of this host."""
        return self.ranks[0]

    @property
    def key(self) -> str:
        """The key of its beats in the store."""
        return f"beat/{self.leader}"

    @property
    def step(self) -> str:
        """The step in which this host was last known to be."""
        return self.beat.partition(" ")[2]

    def __str__(self) -> str:
        return f"{self.name} ({words_of_ranks(self.ranks)})"


class HostWatch:
    """The watch over the other hosts of a run. Before `join`, and on one host, it does nothing.

    Attributes:
        rank: the rank that watches.
        hosts: all hosts of the run, this one included; empty before `join`.
        report: how a rank of another host ended, as it told, or None.
    """

    def __init__(self, status: Status) -> None:
        self.rank = RANK
        self.hosts: list[Host] = []
        self.report: Ending | None = None
        self._status = status
        self._silence = SECONDS_OF_SILENCE
        self._beats = 0
        self._store: Any = None
        self._wakes = threading.Event()
        self._to_tell: Ending | None = None
        self._has_told = threading.Event()

    @property
    def others(self) -> list[Host]:
        """The hosts of the run without this one."""
        return [host for host in self.hosts if self.rank not in host.ranks]

    @property
    def is_leader(self) -> bool:
        """Whether this rank counts the beats of its host, and reads those of the others."""
        return any(self.rank == host.leader for host in self.hosts)

    # ---- Beginning ----
    def join(self, accelerator: Accelerator) -> None:
        """Begin to watch the other hosts, if there are any. Every rank takes part."""
        address = os.environ.get("MASTER_ADDR", "localhost")
        members = gather_object([(self.rank, this_node(), is_address_of_this_host(address))])
        hosts = hosts_of(members)
        if len(hosts) == 1:
            return
        # The store may be older than this attempt of the run, and have the keys of another one.
        attempt = broadcast_object_list([secrets.token_hex(8)])[0]
        self.hosts = hosts
        # The process group's own connection serves one call at a time, and may be waiting in one.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SECONDS_OF_SILENCE),
        )
        self._store = dist.PrefixStore(f"hosts/{attempt}", store)
        self._count_beat()
        accelerator.wait_for_everyone()  # All hosts have a beat in the store now.
        for host in self.hosts:
            host.heard = time.monotonic()
        threading.Thread(target=self._exchange, daemon=True).start()

    # ---- Looking, from the thread of watch.py ----
    def lost(self) -> list[Host]:
        """Return the hosts that no longer answer, on the rank that reads their beats.

        A host that cannot reach the store hears from nobody: then the host of the store is lost.
        """
        if not self.is_leader:
            return []
        now = time.monotonic()
        silent = [host for host in self.others if now - host.heard > self._silence]
        of_store = [host for host in silent if host.has_store]
        return of_store if of_store and len(silent) == len(self.others) else silent

    def why_lost(self, lost: Iterable[Host]) -> str:
        """Return what is known of hosts that no longer answer, for status.json and a line."""
        named = " and ".join(f"host {host}, last in step {host.step}" for host in lost)
        return f"no answer for {self._silence} s from {named}"

    def note_broken_connection(self) -> float:
        """Have less patience with silent hosts, since a connection between hosts has broken.

        Returns:
            The seconds in which a loss is noticed now; 0 on one host.
        """
        if not self.others:
            return 0.0
        self._silence = SECONDS_AFTER_A_BROKEN_CONNECTION
        return self._silence + 2 * SECONDS_BETWEEN_BEATS

    # ---- Telling ----
    @contextlib.contextmanager
    def telling(self, ending: Ending) -> Generator[None]:
        """Tell the other hosts how this rank ends, and wait at the end until they know.

        What is done in this context may record that the run has ended, after which there would be
        no more beats. The wait takes some seconds at most.
        """
        if not self.others:
            yield
            return
        ending = replace(ending, rank=self.rank)
        if not ending.has_place:
            ending = ending.with_place(f"in step {self._status.step}")
        self._to_tell = ending
        self._wakes.set()
        yield
        self._has_told.wait(SECONDS_TO_TELL)

    # ---- The thread that talks to the store, in which a call may never return ----
    def _exchange(self) -> None:
        """Exchange beats with the other hosts until the run has ended or the store is gone."""
        try:
            while (self._status.is_training or self._to_tell) and not self._has_told.is_set():
                self._count_beat()
                self._read_beats()
                self._read_end()
                if self._to_tell:
                    self._write_end(self._to_tell)
                self._wakes.wait(SECONDS_BETWEEN_BEATS)
        except RuntimeError:  # The connection was closed: the host of the store has ended its run.
            self.note_broken_connection()

    def _count_beat(self) -> None:
        if self.is_leader:
            self._beats += 1
            self._store.set(f"beat/{self.rank}", f"{self._beats} {self._status.step}")

    def _read_beats(self) -> None:
        if not self.is_leader:
            return
        beats = self._store.multi_get([host.key for host in self.others])
        for host, beat in zip(self.others, beats, strict=True):
            if beat.decode() != host.beat:
                host.beat = beat.decode()
                host.heard = time.monotonic()

    def _read_end(self) -> None:
        """Read how a rank of another host has ended, and confirm that this host knows it."""
        if self.report or not self._store.check([END]):
            return
        report = Ending.of_json(self._store.get(END))
        if self.is_leader:
            self._store.set(f"knows/{self.rank}", "")
        here = [host for host in self.hosts if self.rank in host.ranks]
        if report.rank not in here[0].ranks:
            self.report = report

    def _write_end(self, ending: Ending) -> None:
        """Write how this rank ends, if it is the first, and wait until every host has read it."""
        self._store.compare_set(END, "", ending.to_json())
        if self.is_leader:
            self._store.set(f"knows/{self.rank}", "")
        keys = [f"knows/{host.leader}" for host in self.others]
        while not self._store.check(keys):
            time.sleep(0.1)
        self._has_told.set()


def this_node() -> tuple[str, str]:
    """Return the name of this host and the number of its launcher.

    Containers may all have one name.
    """
    return HOST, os.environ.get("GROUP_RANK", "")


def hosts_of(members: Iterable[tuple[int, tuple[str, str], bool]]) -> list[Host]:
    """Return the hosts of all ranks, in the order of their first ranks.

    Args:
        members: of each rank its number, what `this_node` returned there, and whether the store is
            there.
    """
    hosts: dict[tuple[str, str], Host] = {}
    for rank, node, has_store in sorted(members):
        host = hosts.setdefault(node, Host(node[0], has_store=has_store))
        host.ranks.append(rank)
    return list(hosts.values())


def words_of_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0-7"; the ranks of a host follow each other."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]}-{ranks[-1]}"


def is_address_of_this_host(address: str) -> bool:
    """Return whether a name or a number, of IPv4 or IPv6, is one of this host's."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as bound:
                bound.bind(place)
                return True
    return False


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an exception may mean that a rank of another host is gone.

    gloo raises a RuntimeError that names it. Those of NCCL and of the store have classes.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
