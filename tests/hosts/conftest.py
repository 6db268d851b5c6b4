# SPDX-License-Identifier: Apache-2.0
"""Two hosts on this machine, connected by a cable."""

import os

import pytest

from two_hosts import Host, command, reason_to_skip


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
