# SPDX-License-Identifier: Apache-2.0
"""What is pushed names no path or user of this machine, or that is told before."""

import json

import pytest

from publishing import copies
from publishing.card import MARKER

ALICE = "/home/alice/runs/lora"


@pytest.fixture
def result(tmp_path, monkeypatch):
    """An empty folder of a result, of the user alice."""
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    return tmp_path


def names_in(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "run.json"}


def made_of(folder, base=None):
    """Return {name: text} of what is pushed in place of files."""
    made = copies.make_copies(folder, base)
    return {name: copy.content.decode() for name, copy in made.items()}


def told_of(folder, repo_id="owner/name"):
    names = names_in(folder)
    made = copies.make_copies(folder, None)
    return list(copies.find_private(folder, names, made, repo_id))


def test_the_record_of_a_whole_model_keeps_the_hub_id_of_its_base(result):
    arguments = {"model_name_or_path": "owner/base", "output_dir": ALICE, "max_length": 9}
    (result / "run.json").write_text(json.dumps({"arguments": arguments, "base_weights": None}))
    record = copies.public_record(result)
    assert record == {"arguments": {"max_length": 9, "model_name_or_path": "owner/base"}}


def test_adapters_name_their_base_in_one_place_only(result):
    (result / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    run = {"arguments": {"model_name_or_path": "owner/base"}, "base_weights": "ab"}
    (result / "run.json").write_text(json.dumps(run))
    record = copies.public_record(result)
    assert record == {"arguments": {}, "base_weights": "ab"}


def test_the_card_of_a_run_says_what_it_recorded_and_nothing_private(result):
    arguments = {
        "model_name_or_path": "/home/alice/base",
        "dataset_name": ["owner/rows", "/home/alice/rows.jsonl"],
        "tracker": "hf_abcdefghijklmnop",
    }
    run = {
        "summary": {"steps": "3", "sample": "a row of the data"},
        "command": ["/home/alice/llama.py", "--tracker", "hf_abcdefghijklmnop"],
        "arguments": arguments,
        "data": "fade",
        "versions": {"torch": "9.9"},
    }
    (result / "run.json").write_text(json.dumps(run))
    lines = [json.dumps({"step": step, "loss": 4.0 - step}) for step in (1, 2, 3)]
    (result / "metrics.jsonl").write_text("\n".join(lines))
    (result / "adapter_config.json").write_text("{}")
    (result / "README.md").write_text(f"{MARKER}\nof an earlier version, by alice\n")
    card = made_of(result, base="owner/base")["README.md"]
    for words in ("base_model: owner/base", "- owner/rows", "| loss | 1 |", "| torch | 9.9 |"):
        assert words in card
    for words in ("alice", "/home", "hf_abcdef", "a row of the data"):
        assert words not in card
    assert "rows.jsonl" in card and "fade" in card
    assert told_of(result) == []


def test_a_card_of_the_users_is_pushed_as_it_is_and_what_it_tells_is_named(result):
    (result / "run.json").write_text('{"arguments": {}}')
    (result / "README.md").write_text(f"by alice in {ALICE}\n")
    assert "README.md" not in copies.make_copies(result, None)
    assert told_of(result) == [
        "README.md has a path of this machine in /home/alice",
        "README.md has the name of this machine's user, alice",
    ]


def test_a_name_that_the_repository_shows_anyway_is_not_told(result):
    (result / "notes.txt").write_text("by alice")
    assert told_of(result, "alice/name") == []
    assert told_of(result) == ["notes.txt has the name of this machine's user, alice"]
