# SPDX-License-Identifier: Apache-2.0
"""A planted fault happens in the function, the call, the step and on the rank that it names."""

import json
import sys
import types

import pytest
import torch

from proof.faults import Fault, PlantedFault, find_target, load

RECIPE = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import components

Arguments = None


def start(kind, description):
    return None


def summed_loss(model, batch):
    return 2.0


class Trainer:
    def save(self, name):
        os.mkdir(name)
        os.rename(name, f"{name}-done")
        return f"saved {name}"


def main(args):
    print(sys.argv, sys.path[0])
    Trainer().save("first")
    Trainer().save("second")
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe as a module, with a component that it imports."""
    component = types.ModuleType("components")
    component.Run = type("Run", (), {"save": lambda self: "saved"})
    component.evaluate = lambda: "evaluated"
    monkeypatch.setitem(sys.modules, "components", component)
    monkeypatch.setitem(sys.modules, "recipe", None)
    (tmp_path / "recipe.py").write_text(RECIPE)
    return load(str(tmp_path / "recipe.py"))


def plant(recipe, rank=0, **fields):
    fault = Fault(**fields)
    PlantedFault(fault, find_target(fault.at, recipe), rank).plant()


@pytest.mark.parametrize(
    ("at", "owner", "name"),
    [
        ("summed_loss", lambda recipe: recipe, "summed_loss"),
        ("recipe:summed_loss", lambda recipe: recipe, "summed_loss"),
        ("recipe:Trainer.save", lambda recipe: recipe.Trainer, "save"),
        ("components:evaluate", lambda recipe: recipe.components, "evaluate"),
        ("components:Run.save", lambda recipe: recipe.components.Run, "save"),
    ],
)
def test_a_target_is_a_function_or_a_method_of_any_module(at, owner, name, recipe):
    target = find_target(at, recipe)
    assert target.owner is owner(recipe) and target.name == name


@pytest.mark.parametrize(
    "at", ["missing", "recipe:missing", "no_module:f", "components:Run.missing"]
)
def test_a_target_that_is_not_there_is_an_error(at, recipe):
    with pytest.raises((AttributeError, ImportError)):
        plant(recipe, do="SIGTERM", at=at)


def test_a_fault_in_a_method_happens_at_its_call(recipe, tmp_path):
    plant(recipe, do="wait", at="components:Run.save", call=2, file=tmp_path / "mark")
    run = recipe.components.Run()
    assert run.save() == "saved" and not (tmp_path / "mark").exists()
    assert run.save() == "saved" and (tmp_path / "mark").exists()


def test_a_fault_with_a_row_happens_whenever_the_row_is_in_the_batch(recipe):
    plant(recipe, do="inf", at="summed_loss", row=7)
    losses = [recipe.summed_loss(None, {"row": rows}) for rows in ([6, 8], [7, 9], [7])]
    assert losses == [2.0, float("inf"), float("inf")]


@pytest.fixture
def status(monkeypatch):
    """What a run says of its step."""
    status = types.SimpleNamespace(step=1)
    module = types.SimpleNamespace(process_status=lambda: status)
    monkeypatch.setitem(sys.modules, "components.status", module)
    return status


def test_a_fault_with_a_step_happens_once_and_only_in_training(recipe, status):
    plant(recipe, do="inf", at="recipe:summed_loss", step=3)
    losses = []
    for step in (2, 3, 3, 4):
        status.step = step
        losses.append(recipe.summed_loss(None, {"row": []}))
    assert losses == [2.0, float("inf"), 2.0, 2.0]
    plant(recipe, do="inf", at="summed_loss", step=5)
    status.step = 5
    with torch.no_grad():
        assert recipe.summed_loss(None, {"row": []}) == 2.0


def test_an_infinite_gradient_leaves_the_loss_as_it_is(recipe):
    weight = torch.ones(2, requires_grad=True)
    recipe.summed_loss = lambda model, batch: weight.sum()
    plant(recipe, do="inf gradient", at="summed_loss")
    loss = recipe.summed_loss(None, {"row": []})
    loss.backward()
    assert loss.item() == 2 and weight.grad.isinf().all()


def test_rows_of_training_batches_are_recorded_with_their_step(recipe, status, tmp_path):
    plant(recipe, rank=1, do="record rows", at="summed_loss", file=tmp_path / "rows")
    recipe.summed_loss(None, {"row": [1, 2]})
    with torch.no_grad():
        recipe.summed_loss(None, {"row": [3]})  # an evaluation
    assert json.loads((tmp_path / "rows.1").read_text()) == {"step": 1, "rows": [1, 2]}
