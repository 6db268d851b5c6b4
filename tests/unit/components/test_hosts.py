# SPDX-License-Identifier: Apache-2.0
"""What hosts of a run learn from each other; the launches are in tests/hosts."""

import threading
import time

import pytest
import torch.distributed as dist

from components import hosts
from components.hosts import (
    HostWatch,
    hosts_of,
    words_of_ranks,
)
from components.status import Ending, Status

MEMBERS = [
    (2, ("b", "1"), False),
    (0, ("a", "0"), True),
    (1, ("a", "0"), True),
    (3, ("b", "1"), False),
]


def test_ranks_are_grouped_by_host_in_order():
    assert [str(host) for host in hosts_of(MEMBERS)] == ["a (ranks 0-1)", "b (ranks 2-3)"]
    assert [host.leader for host in hosts_of(MEMBERS)] == [0, 2]
    assert words_of_ranks([5]) == "rank 5"


def test_two_containers_of_one_name_are_two_hosts():
    assert len(hosts_of([(0, ("box", "0"), True), (1, ("box", "1"), False)])) == 2


@pytest.fixture
def watches(monkeypatch):
    """A function to the watches of the first ranks of some hosts, which begin to exchange beats."""
    monkeypatch.setattr(hosts, "SECONDS_BETWEEN_BEATS", 0.05)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def begin(members):
        for host in hosts_of(members):
            watch = HostWatch(Status())
            watch.rank = host.leader
            watch.hosts = hosts_of(members)
            watch._silence = 1
            port = server.port
            client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            watch._store = dist.PrefixStore("hosts", client)
            watch._count_beat()
            made.append(watch)
        for watch in made:
            for host in watch.hosts:
                host.heard = time.monotonic()
            threading.Thread(target=watch._exchange, daemon=True).start()
        return made

    yield begin
    for watch in made:
        watch._status.state = "done"


def wait_for(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_host_without_beats_is_lost_and_the_others_are_not(watches):
    a, b, c = watches([(0, ("a", ""), True), (1, ("b", ""), False), (2, ("c", ""), False)])
    c._status.step = 7
    wait_for(lambda: a.hosts[2].step == "7")
    assert a.lost() == b.lost() == []
    c._status.state = "done"
    wait_for(lambda: a.lost() and b.lost())
    assert [host.name for host in a.lost()] == [host.name for host in b.lost()] == ["c"]
    assert a.why_lost(a.lost()) == "no answer for 1 s from host c (rank 2), last in step 7"


def test_a_host_that_hears_nobody_has_lost_the_host_of_the_store(watches):
    a, b, c = watches([(0, ("a", ""), False), (1, ("b", ""), True), (2, ("c", ""), False)])
    for watch in (b, c):
        watch._status.state = "done"
    wait_for(lambda: len([host for host in a.others if host.beat]) == 2 and a.lost())
    time.sleep(0.5)  # The second one is silent a moment later.
    assert [host.name for host in a.lost()] == ["b"]


def test_other_hosts_learn_how_a_rank_ended_and_where(watches):
    a, b = watches([(0, ("a", ""), True), (1, ("b", ""), False)])
    b._status.step = 3
    start = time.monotonic()
    # The name of a host, which may be a short one, can be a part of any text.
    with b.telling(Ending.failed(73, "OSError", f"error: the disk of {hosts.HOST}2 is full")):
        b._status.state = "failed"
        time.sleep(3 * hosts.SECONDS_BETWEEN_BEATS)  # as long as a slow disk takes to record it
    assert time.monotonic() - start < hosts.SECONDS_TO_TELL, "nobody confirmed it"
    wait_for(lambda: a.report)
    assert a.report.exit_code == 73 and b.report is None
    text = f"error: rank 1 on {hosts.HOST} ended in step 3: the disk of {hosts.HOST}2 is full"
    assert a.report.text == text
