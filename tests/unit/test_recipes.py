# SPDX-License-Identifier: Apache-2.0
"""A recipe shows its work in one order, hides nothing behind the strategy, and explains each flag;
no function stands twice."""

import ast
import dataclasses
import functools
import importlib
import re
from collections import Counter

import pytest

from core.cli import Parser, may_change, settings_of, with_extras
from jobs import RECIPES as LISTED
from jobs import SAME_AS
from launching import REPO

RECIPES = sorted((REPO / "recipes").glob("*.py"))
ROOMS = ("core", "tasks", "extras")
MODULES = sorted(path for room in ROOMS for path in (REPO / "recipes" / room).rglob("*.py"))
BANNERS = ["Data", "Model, optimizer, schedule", "Train", "Save"]
VERBS = [  # calls of each `train`, in order
    "make_accelerator",
    "run.start",
    "set_seed",
    "run.check_plan",
    "run.summarize",
    "make_optimizer",
    "accelerator.prepare",
    "run.resume",
    "run.steps",
    "accelerator.accumulate",
    "backward_of_sum",
    "accelerator.clip_grad_norm_",
    "run.skip_if_not_finite",
    "optimizer.step",
    "schedule.step",
    "optimizer.zero_grad",
    "run.finish_step",
    "save_model",
    "run.finish",
]
# What a recipe says whose forward and backward passes belong to a pipeline
OF_PIPELINES = {
    "pipeline.step": "backward_of_sum",
    "pipeline.clip_gradients": "accelerator.clip_grad_norm_",
}


def by_name(path):
    return path.name


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


@functools.cache
def values_read_by(path):
    """The names that a file reads from arguments, or from itself where that is a group of them."""
    text = path.read_text()
    found = re.findall(r"\b(?:_?args|self)\.(?=(\w+))", text)
    return {*found, *re.findall(r'getattr\(args, "(\w+)"', text)}


def function(path, name):
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{path.name} has no function {name}")


def calls_in(node):
    """The calls in a tree, as (line, name as it is written)."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return sorted((call.lineno, call.col_offset, ast.unparse(call.func)) for call in calls)


def test_the_recipes_are_the_expected_ones():
    assert [path.stem for path in RECIPES] == sorted([*LISTED, *SAME_AS])
    assert not (REPO / "recipes" / "__init__.py").exists()


@pytest.mark.parametrize("path", RECIPES, ids=by_name)
class TestRecipe:
    def test_train_shows_the_same_work_in_the_same_order_and_names_no_strategy(self, path):
        main = function(path, "train")
        source = ast.get_source_segment(path.read_text(), main)
        assert not re.search("fsdp|deepspeed|distributedtype|zero_stage", source.lower())
        assert re.findall(r"# ---- (.*) ----", source) == BANNERS
        names = [OF_PIPELINES.get(name, name) for _, _, name in calls_in(main)]
        assert [name for name in names if name in VERBS] == VERBS

    def test_every_argument_is_explained_and_used(self, path):
        module = importlib.import_module(path.stem)
        kind = with_extras(module.Arguments)
        shown = Parser(kind, module.__doc__).format_help()
        assert module.__doc__.strip() in shown
        fields = {field.name for field in dataclasses.fields(kind)}
        settings = settings_of(kind)
        assert all(settings[name]["help"] for name in fields)
        assert fields <= set().union(*map(values_read_by, [path, *MODULES]))

    def test_its_flags_are_those_that_people_know(self, path, golden):
        """A frozen table (pytest --record): a change is a decision, also of what may change when a
        run continues."""
        kind = with_extras(importlib.import_module(path.stem).Arguments)
        free = may_change(kind)
        row = {}
        for action in Parser(kind)._actions:
            for flag in action.option_strings:
                if flag.startswith("--") and "-" not in flag.removeprefix("--"):
                    choices = list(action.choices) if action.choices else None
                    when_continued = "any" if action.dest in free else "same"
                    row[flag] = [action.default, choices, when_continued]
        golden.check("flags", path.stem, row)


def test_no_function_of_more_than_five_lines_stands_twice():
    bodies = Counter()
    for path in [*RECIPES, *MODULES]:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name not in ("train", "main"):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                text = "\n".join(ast.unparse(statement) for statement in body)
                if text.count("\n") >= 5:
                    bodies[text] += 1
    assert [text for text, number in bodies.items() if number > 1] == []
