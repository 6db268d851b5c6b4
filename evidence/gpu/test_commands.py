# SPDX-License-Identifier: Apache-2.0
"""Every command line that only a GPU runs is one that the recipe accepts, which needs no GPU."""

import contextlib

import pytest

import llama
from contestants import words_of
from core.cli import parse
from gpu import runs, test_precisions, test_quantized, test_race, test_resume
from gpu import test_planner as planner
from gpu import test_strategies as strategies

LAUNCHES = [
    *((strategies, "trains", name) for name in strategies.CELLS),
    *((test_resume, "resumes", name) for name in test_resume.CLAIMS),
    *((test_precisions, name, None) for name in ("precisions", "packed", "packed_rows")),
    *((test_quantized, name, None) for name in ("bases", "optimizers")),
]
JOBS = []
for flags, own in test_race.CELLS.values():
    JOBS += [flags | own[label] for label in own if label.startswith("ours")]
for _, _, points in planner.CELLS.values():
    for rows, length, flags in points:
        JOBS.append(flags | {"per_device_train_batch_size": rows, "max_length": length})
FILES = ("--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", "run")


@pytest.mark.parametrize(("module", "name", "variant"), LAUNCHES)
def test_the_recipe_accepts_every_launch(module, name, variant, tmp_path, monkeypatch):
    commands = []

    def keep(cell, variants, data=tmp_path):
        commands.extend(runs.command_of(cell, one, data, tmp_path) for one in variants)

    def train_all(*arguments):
        keep(*arguments)
        raise StopIteration

    monkeypatch.setattr(module, "train_all", train_all, raising=False)
    monkeypatch.setattr(module, "compare_with_first", keep, raising=False)
    monkeypatch.setattr(module, "needs_compiler", lambda: None, raising=False)
    monkeypatch.setattr(runs.Cell, "model", lambda cell, wide=False: tmp_path)
    cell = runs.Cell(True, {}, tmp_path, tmp_path)
    function = getattr(module, f"test_{name}")
    arguments = [variant, cell] if variant else [cell]
    with contextlib.suppress(StopIteration):
        function(*arguments)
    assert commands
    for command in commands:
        words = command[command.index("recipes/llama.py") + 1 :]
        parse(llama.Arguments, words=words)  # SystemExit if it refuses them


@pytest.mark.parametrize("flags", JOBS)
def test_the_recipe_accepts_every_job(flags):
    parse(llama.Arguments, words=[*words_of(flags), *FILES])
