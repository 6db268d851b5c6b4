# SPDX-License-Identifier: Apache-2.0
"""What is pushed names no path or user of this machine, or that is told before."""

import json

import pytest

from components.folder import MARKER
from publishing import copies

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
    made = copies.make_copies(folder, names_in(folder), base)
    return {name: copy.content.decode() for name, copy in made.items()}


def told_of(folder, repo_id="owner/name"):
    names = names_in(folder)
    made = copies.make_copies(folder, names, None)
    return list(copies.find_private(folder, names, made, repo_id))


def test_the_record_of_a_whole_model_keeps_the_hub_id_of_its_base(result):
    arguments = {"model_name_or_path": "owner/base", "output_dir": ALICE, "max_length": 9}
    (result / "run.json").write_text(json.dumps({"arguments": arguments, "base_weights": None}))
    record = json.loads(made_of(result)["run_public.json"])
    assert record == {"arguments": {"max_length": 9, "model_name_or_path": "owner/base"}}


def test_adapters_name_their_base_in_one_place_only(result):
    (result / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    run = {"arguments": {"model_name_or_path": "owner/base"}, "base_weights": "ab"}
    (result / "run.json").write_text(json.dumps(run))
    record = json.loads(made_of(result)["run_public.json"])
    assert record == {"arguments": {}, "base_weights": "ab"}


def test_a_card_of_a_run_is_masked_and_one_of_the_users_is_named(result):
    (result / "README.md").write_text(f"{MARKER}\nby alice in {ALICE}\n")
    assert made_of(result) == {"README.md": f"{MARKER}\nby user in lora\n"}
    assert told_of(result) == []
    (result / "README.md").write_text(f"by alice in {ALICE}\n")
    assert made_of(result) == {}
    assert told_of(result) == [
        "README.md has a path of this machine in /home/alice",
        "README.md has the name of this machine's user, alice",
    ]


def test_a_name_that_the_repository_shows_anyway_is_not_told(result):
    (result / "notes.txt").write_text("by alice")
    assert told_of(result, "alice/name") == []
    assert told_of(result) == ["notes.txt has the name of this machine's user, alice"]
