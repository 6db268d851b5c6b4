# SPDX-License-Identifier: Apache-2.0
"""The card of a merged folder is that of the run with the merge added, and says what is known."""

import json

import pytest
from huggingface_hub import ModelCard

from adapter_folders import write_adapters
from components.folder import MARKER
from merged_folders import edit_json, read_receipt

RUN_CARD = f"""---
library_name: peft
license: apache-2.0
datasets:
- owner/rows
tags:
- accelerate
- lora
---

# adapters

{MARKER}

Instruction tuning.

## Results

| loss | 1.5 |

## Command

```bash
## not a heading
train --model_name_or_path owner/base
```

## Loss

![Loss by step](loss.png)

## Load it

AutoPeftModelForCausalLM
"""


@pytest.fixture(scope="module")
def adapters(tied, once):
    return once("merging_card_adapters", lambda folder: write_adapters(folder, tied))


@pytest.fixture
def merged_card(adapters, merge, tmp_path):
    """A function that merges a copy of adapters with this README.md, and returns the new card."""

    def make(text, change=None):
        folder = tmp_path / "adapters"
        folder.symlink_to(adapters) if text is None and change is None else copy(adapters, folder)
        if text is not None:
            (folder / "README.md").write_text(text)
        if change is not None:
            change(folder)
        code, printed = merge(folder, tmp_path / "merged")
        assert code == 0, printed
        return ModelCard.load(tmp_path / "merged" / "README.md")

    return make


def copy(source, target):
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def test_the_card_of_the_run_gets_the_table_of_the_receipt(merged_card, tmp_path):
    card = merged_card(RUN_CARD)
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0" and card.data.datasets == ["owner/rows"]
    assert card.data.tags == ["accelerate"] and card.data.base_model is None
    assert "\n# merged\n" in card.text and "\n# adapters" not in card.text and MARKER in card.text
    for kept in ("Instruction tuning.", "| loss | 1.5 |", "```bash\n## not a heading\ntrain"):
        assert kept in card.text
    assert "Peft" not in card.text and "AutoModelForCausalLM.from_pretrained" in card.text
    assert "loss.png" not in card.text
    receipt = read_receipt(tmp_path / "merged")
    merge = card.text.split("## Merge")[1].split("## Load it")[0]
    assert receipt["adapters_sha256"] in merge and "| merged into | the base as it is |" in merge
    for row in receipt["comparisons"]:
        (line,) = [line for line in merge.split("\n") if line.startswith(row["name"] + " ")]
        assert f"{row['largest_logit_gap']:.2e}" in line and "50/50 same" in line


def test_a_card_names_no_path_of_this_machine(merged_card, tmp_path):
    assert str(tmp_path.parent) not in str(merged_card(RUN_CARD))


def test_without_a_card_it_says_what_the_record_of_the_run_says(merged_card):
    def record(folder):
        edit_json(folder / "run.json", summary={"strategy": "DDP"}, versions={"torch": "9.9"})
        (folder / "README.md").unlink()

    card = merged_card(None, record)
    assert "Fingerprint of the base's weights: `" in card.text
    assert "| strategy | DDP |" in card.text and "| torch | 9.9 |" in card.text


def test_the_stub_that_peft_leaves_is_not_taken_for_the_run(adapters, merged_card):
    stub = (adapters / "README.md").read_text()
    assert "[More Information Needed]" in stub  # peft's own save_pretrained has written it
    assert "[More Information Needed]" not in merged_card(None).text


def test_without_a_record_of_the_run_the_card_says_so(merged_card):
    card = merged_card(None, lambda folder: (folder / "run.json").unlink())
    assert "has left no record" in card.text and "## Merge" in card.text


def test_a_card_of_the_users_keeps_its_words(merged_card):
    card = merged_card("---\nlicense: mit\n---\n\n# Mine\n\nSee /v1/chat.\n")
    assert card.data.license == "mit" and "See /v1/chat." in card.text


def test_a_damaged_card_of_the_run_costs_only_the_card(adapters, merge, tmp_path):
    copy(adapters, tmp_path / "adapters")
    (tmp_path / "adapters" / "README.md").write_text("---\na: [1\n---\n")
    code, printed = merge(tmp_path / "adapters", tmp_path / "merged")
    assert code == 0 and "warning: the model card is not written: " in printed
    assert read_receipt(tmp_path / "merged")["passed"]
    assert not (tmp_path / "merged" / "README.md").exists()


def test_a_card_may_be_edited_after_the_merge(merged_card, merge, tmp_path):
    merged_card(RUN_CARD)
    with (tmp_path / "merged" / "README.md").open("a") as file:
        file.write("More of my own.\n")
    code, printed = merge(tmp_path / "adapters", tmp_path / "merged", "--check")
    assert code == 0, printed
    assert (
        "README.md" not in json.loads((tmp_path / "merged" / "receipt.json").read_text())["files"]
    )
