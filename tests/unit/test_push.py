# SPDX-License-Identifier: Apache-2.0
"""What is made for a push names no path of this machine, and what is private is refused or told."""

import json

import push


def made_of(path, run, base=None):
    """Return {name: text} of what is pushed in place of files."""
    (path / "run.json").write_text(json.dumps(run))
    return {name: content.decode() for name, content in push.make_copies(path, base).items()}


def test_the_card_of_a_run_says_what_it_recorded_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    arguments = {
        "model_name_or_path": "/home/alice/base",
        "dataset_name": ["owner/rows", "/home/alice/rows.jsonl"],
    }
    run = {
        "summary": {"sample": "a row of the data"},
        "command": ["/home/alice/llama.py", "--tracker", "hf_abcdefghijklmnop"],
        "arguments": arguments,
    }
    (tmp_path / "adapter_config.json").write_text("{}")
    made = made_of(tmp_path, run, base="owner/base")
    card = made["README.md"]
    for words in ("base_model: owner/base", "- owner/rows", "rows.jsonl"):
        assert words in card
    for words in ("alice", "hf_abcdef", "a row of the data"):
        assert words not in card
