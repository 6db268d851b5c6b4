# SPDX-License-Identifier: Apache-2.0
"""A recipe is a template: one command copies it into a folder that needs nothing else from here."""

import os
import sys

import pytest

import net
from jobs import RECIPES
from launching import read_metrics, run, script

# Prints, when the recipe ends, the files of all modules that lie neither beside it nor in packages
WATCH = """
import atexit, runpy, sys, sysconfig
before = set(sys.modules)  # of a warm start
def foreign():
    known = (sys.path[0], sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    modules = [module for name, module in list(sys.modules.items()) if name not in before]
    files = [getattr(module, "__file__", None) or "" for module in modules]
    files = [file for file in files if file.startswith("/") and file.endswith(".py")]
    print("foreign:", [file for file in files if not file.startswith(known)])
atexit.register(foreign)
recipe, *sys.argv = sys.argv[1], *sys.argv[1:]
sys.path[0] = "{folder}"
runpy.run_path(recipe, run_name="__main__")
"""


@pytest.fixture
def copied(tmp_path):
    """A function that copies a recipe as a user does, and returns the new folder."""

    def copy(name):
        script("copy_recipe", name, tmp_path / "my_project", code=0)
        return tmp_path / "my_project"

    return copy


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_trains_in_its_own_folder_only(recipe, copied, net_tiny, tmp_path):
    folder = copied(recipe)
    (tmp_path / "watch.py").write_text(WATCH.format(folder=folder))
    flags = ["--max_steps", 3, "--save_steps", 2, "--output_dir", "run"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, tmp_path / "watch.py", folder / f"{recipe}.py"]
    words = [*net.data_of(net_tiny(recipe)), *flags]
    done = run(*command, *words, cwd=tmp_path, env=environment, code=0)
    assert "foreign: []" in done.output, done.output[-1000:]
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(steps) == 3 and evaluations
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert (tmp_path / "run" / "model.safetensors").is_file()


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
# {name: (file, text, text in its place, text at its end)}: what people change first, in a copy of
# llama
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
FLAGS = {"data": ["--skip_bad_rows"]}
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


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_few_lines_trains_and_continues_to_the_same_bits(name, copied):
    folder = copied("llama")
    file, *change = EDITS[name]
    edit(folder / file, *change)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "test_copy.py", *FLAGS.get(name, [])]
    run(*words, cwd=folder, env=environment, code=0)
