# SPDX-License-Identifier: Apache-2.0
"""What is published names no path, user or host of this machine, and keeps all else."""

import pytest

from publishing.private_text import Cleaner


@pytest.fixture
def alice(monkeypatch):
    """This process as that of a user on a host of their own."""
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.lab")


def test_a_path_with_a_space_and_the_home_folder_are_hidden(alice):
    clean = Cleaner({"data": ["/home/alice/my rows/a.jsonl"]})
    said = clean("from /home/alice/my rows/a.jsonl and /home/alice, see https://hf.co/docs/x")
    assert said == "from a.jsonl and home, see https://hf.co/docs/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trained by alice", "trained by user"),
        ("../alice/rows.jsonl", "../user/rows.jsonl"),
        ("alice_rows.jsonl", "user_rows.jsonl"),
        ("on node-7.lab and node-7", "on host and host"),
        ("malice, alices", "malice, alices"),
    ],
)
def test_a_bare_name_of_the_user_or_the_host_is_masked(text, said, alice):
    assert Cleaner({})(text) == said


def test_flags_and_hub_ids_that_have_the_name_are_kept(alice):
    clean = Cleaner({"model_name_or_path": "alice/base", "dataset_name": ["alice/rows"]})
    text = "alice/base and alice/rows, --alice 1, --x alice"
    assert clean(text) == "alice/base and alice/rows, --alice 1, --x user"


def test_a_name_that_many_machines_have_is_no_secret(monkeypatch):
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu")
    assert Cleaner({})("the root of the mean on one gpu") == "the root of the mean on one gpu"
