# SPDX-License-Identifier: Apache-2.0
"""A card says what the run recorded, nothing private, and replaces no README.md of the user's."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from components.folder import CARD
from components.launch_command import Launch
from components.model_card import write_card

STUB = "# Model Card for Model ID\n\n[More Information Needed]\n"


@dataclasses.dataclass
class Arguments:
    output_dir: str
    model_name_or_path: str = "owner/base"
    dataset_name: str = "owner/rows"
    model_revision: str = "main"
    use_peft: bool = False
    learning_rate: float = 1.0
    tracker: str = ""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments of a finished run with three logged steps in its folder."""
    monkeypatch.setattr(sys, "argv", ["/home/alice/recipes/llama.py", "--x", "hf_abcdefghijklmnop"])
    args = Arguments(str(tmp_path))
    run = {
        "summary": {"model": "owner/base, 9 parameters", "sample": "a row of the data"},
        "arguments": vars(args),
        "data": "fade",
        "rows_per_step": 8,
        "versions": {"torch": "9.9"},
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    lines = [json.dumps({"step": step, "loss": 4.0 - step}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    return args


def card_of(args):
    """Write the card, and return it as the hub's library reads it."""
    assert write_card(args) is None
    return ModelCard.load(Path(args.output_dir, CARD))


def test_a_card_has_what_the_run_recorded(arguments):
    arguments.learning_rate = 0.5
    card = card_of(arguments)
    assert card.data.base_model == "owner/base" and card.data.datasets == ["owner/rows"]
    assert card.data.library_name == "transformers" and card.data.license is None
    assert card.data.pipeline_tag == "text-generation"
    for line in (
        "| hash of the rows | fade |",
        "| --learning_rate | 0.5 |",
        "| torch | 9.9 |",
        "| 1 | 3 |",
        "| loss | 1 |",
    ):
        assert line in card.text


def test_a_card_has_no_path_token_user_or_row(arguments):
    arguments.model_name_or_path = "/home/alice/models/base"
    arguments.dataset_name = "/home/alice/rows.jsonl"
    arguments.tracker = "hf_abcdefghijklmnop"
    path = Path(arguments.output_dir, "run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"arguments": vars(arguments)}))
    card = card_of(arguments)
    assert card.data.base_model is None and card.data.datasets is None
    for private in ("alice", "/home", arguments.output_dir, "hf_abcdef", "a row of the data"):
        assert private not in str(card)
    assert "rows.jsonl" in card.text and "hf_***" in card.text


def test_a_readme_of_the_user_is_left_and_told(arguments):
    path = Path(arguments.output_dir, CARD)
    path.write_text("mine")
    assert "left as it is" in write_card(arguments)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("before", [STUB, None])
def test_a_stub_of_peft_and_an_older_card_are_replaced(before, arguments):
    if before is None:
        card_of(arguments)
    else:
        Path(arguments.output_dir, CARD).write_text(before)
    arguments.learning_rate = 0.25
    card = card_of(arguments)
    assert "| --learning_rate | 0.25 |" in card.text and "More Information" not in card.text


def test_an_address_of_another_machine_is_masked_in_the_command(arguments, monkeypatch):
    launch = Launch({"main_process_ip": "10.0.0.7", "num_machines": 2}, "/")
    monkeypatch.setattr("components.model_card.find_readable_launch", lambda: launch)
    text = card_of(arguments).text
    assert "--num_machines 2" in text and "10.0.0.7" not in text
