# SPDX-License-Identifier: Apache-2.0
"""A recipe is a template: one command copies it into a folder that needs nothing else from here."""

import os
import sys

import pytest

import net
from launching import run, script


@pytest.fixture
def copied(tmp_path):
    """A function that copies a recipe as a user does, and returns the new folder."""

    def copy(name):
        script("copy_recipe", name, tmp_path / "my_project", code=0)
        return tmp_path / "my_project"

    return copy


# An optimizer that keeps numbers in its groups, as Prodigy and schedule-free ones do
OWN_OPTIMIZER = """

class Slowing(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = group["lr"] / group["k"]
        super().step(closure)
"""
ADAMW = "torch.optim.AdamW(groups, fused=is_fused, **settings)"
READ = "return read_conversation(row, PROMPT_AND_ANSWER, columns)"
LOSS = "    token_loss = LossInHead("
EPOCH = "epoch=step / plan.steps_per_epoch"
# {what people change first: (file, text, text in its place, text at its end)}, in a copy of llama
EDITS = {
    "loss": (
        "core/loss.py",
        '(logits, targets, reduction="none")',
        '(logits, targets, reduction="none", label_smoothing=0.1)',
        "",
    ),
    "optimizer": ("core/model.py", ADAMW, "Slowing(groups, **settings)", OWN_OPTIMIZER),
    "data": (
        "llama.py",
        READ,
        'if len(row["completion"]) > 60:\n'
        '        raise ValueError("is too long for us")\n'
        '    row = {"prompt": row["prompt"].upper(), "completion": row["completion"]}\n'
        f"    {READ}",
        "",
    ),
    "metric": (
        "llama.py",
        f"{EPOCH})",
        f"{EPOCH},\n"
        '            more=lambda: {"trained_share": (num_trained_on / num_tokens).item()})',
        "",
    ),
    "frozen layers": (
        "llama.py",
        LOSS,
        "    for parameter in model.model.layers[0].parameters():\n"
        f"        parameter.requires_grad_(False)\n{LOSS}",
        "",
    ),
}
# An optimizer with state that no checkpoint has a place for
REMEMBERING = """

class Remembering(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for entries in self.state.values():
            entries["history"] = [1, 2]
"""


def edit(path, before, after, end):
    text = path.read_text()
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after) + end)


def test_state_that_cannot_be_saved_ends_the_run_after_one_step(copied, net_tiny, tmp_path):
    folder = copied("llama")
    edit(folder / "core" / "model.py", ADAMW, "Remembering(groups, **settings)", REMEMBERING)
    command = [sys.executable, folder / "llama.py", *net.data_of(net_tiny("llama"))]
    done = run(*command, "--max_steps", 3, "--output_dir", tmp_path / "run", cwd=folder, code=1)
    assert "history" in done.output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_edits_of_a_few_lines_train_and_continue_to_the_same_bits(copied):
    folder = copied("llama")
    for file, *change in EDITS.values():
        edit(folder / file, *change)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Rows that the edit of the data refuses are left out
    run(sys.executable, "test_copy.py", "--skip_bad_rows", cwd=folder, env=environment, code=0)
