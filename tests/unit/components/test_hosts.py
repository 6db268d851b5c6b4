# SPDX-License-Identifier: Apache-2.0
"""What hosts of a run learn from each other; the launches are in tests/hosts."""

import threading
import time

import pytest
import torch.distributed as dist

from components import host_checks, hosts
from components.host_checks import compare_clocks
from components.hosts import (
    HostWatch,
    hosts_of,
    is_address_of_this_host,
    is_broken_connection,
    words_of_ranks,
)
from components.status import Ending, Status
from fakes import fake_accelerator

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


def test_a_text_that_names_the_place_is_told_as_it_is(watches):
    a, b = watches([(0, ("a", ""), True), (1, ("b", ""), False)])
    with b.telling(Ending.failed(1, "gone", "error: rank 2 is gone in step 3", has_place=True)):
        b._status.state = "failed"
    wait_for(lambda: a.report)
    assert a.report.text == "error: rank 2 is gone in step 3"


@pytest.mark.parametrize(
    ("address", "is_here"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False), ("", False)],
)
def test_the_host_of_the_store_is_known_by_its_address(address, is_here):
    assert is_address_of_this_host(address) == is_here


def test_on_one_host_nobody_is_told():
    watch = HostWatch(Status())
    with watch.telling(Ending.failed(1, "why")):
        assert watch._to_tell is None


def test_only_errors_of_connections_make_it_impatient():
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert is_broken_connection(RuntimeError(gloo)) and is_broken_connection(dist.DistError())
    assert not is_broken_connection(RuntimeError("CUDA out of memory"))
    assert not is_broken_connection(ValueError(gloo))


@pytest.mark.parametrize("apart", [0.5, 3600])
def test_clocks_that_are_far_apart_are_named_and_no_report_is_missed(apart, monkeypatch, capsys):
    status = Status()
    status.began = "2026-01-01 01:00:00"
    clocks = [(1000.0 + apart, "a", status.began), (1000.0, "b", "2026-01-01 00:00:00")]
    monkeypatch.setattr(host_checks, "gather_object", lambda _: clocks)
    monkeypatch.setattr(host_checks, "process_status", lambda: status)
    compare_clocks(fake_accelerator(wait_for_everyone=lambda: None))
    said = capsys.readouterr().err
    assert status.began == "2026-01-01 00:00:00"
    assert said.startswith("warning: the clock of a is 3600 s ahead of that of b") == (apart > 5)
    assert bool(said) == (apart > 5)
