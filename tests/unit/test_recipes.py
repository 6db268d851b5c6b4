# SPDX-License-Identifier: Apache-2.0
"""A recipe shows its work in one order, hides nothing behind the rank or the strategy, and imports
only core, tasks and required packages; those know no recipe, and import lower ones only."""

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
# Calls in which every rank has to take part
COLLECTIVES = set(
    """
    barrier broadcast all_to_all_single gather_for_metrics wait_for_everyone load_state save_state
    accumulate answer_logps _any_rank_must_stop backward backward_of_sum make_layout
    group_of_this_rank broadcast_object_list self._nonfinite.check check_plan clip_grad_norm_
    clip_gradients full_tensor reduce_gradients all_reduce sum_over_rows sum_over_tokens
    sum_over_stages compare_answers evaluate evaluate_classifier evaluate_perplexity
    evaluate_tags evaluation_loader find_cause finish finish_step gather gather_object generate
    interruptible self._watch.vote load_on_rank_0 losses mean_losses mean_metrics measure new_group
    next_step predict prepare reduce resume find_reference save_and_end save_model share_new_modules
    skip_if_not_finite run.start start_trackers steps summarize summed_losses summed_tag_loss
    summed_target_loss token_loss training_loader weighted_row_losses adapter_weights _between_steps
    _check_nonfinite _end _find_checkpoint _find_damage _on_rank_0 _load_best _note_if_best
    _save_if_new _finish_save self._checkpoints.begin self._checkpoints.finish fill collect
    model_weights make_patient_group share_of on_rank_0 _stop fill_weights
    """.split()
)
RANK = "main_process|process_index|RANK"
LEAVES = (ast.Return, ast.Break, ast.Continue)


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


def imports_of(path):
    """The modules that a file imports, including those inside functions."""
    imported = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
            if node.module in ROOMS:
                imported |= {f"{node.module}.{name.name}" for name in node.names}
    return imported


def run_by_some_ranks(node, lines):
    """The nodes in the branches of any kind of condition on the rank, in a file of these lines."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While | ast.BoolOp):
        return []
    test = getattr(node, "test", node)
    source = "".join(lines[test.lineno - 1 : test.end_lineno])  # unparsing all takes seconds
    if not re.search(RANK, source) or not re.search(RANK, ast.unparse(test)):
        return []
    branches = [child for child in ast.iter_child_nodes(node) if child is not test]
    return [inner for branch in branches for inner in ast.walk(branch)]


def test_the_recipes_are_the_expected_ones():
    assert [path.stem for path in RECIPES] == sorted([*LISTED, *SAME_AS])
    assert not (REPO / "recipes" / "__init__.py").exists()


def find_calls_on_some_ranks(path):
    """What some ranks do without the others in a file: collective calls, and leaving."""
    found = []
    lines = path.read_text().splitlines()
    for outer in nodes_of(path):
        for node in run_by_some_ranks(outer, lines):
            if isinstance(node, LEAVES):
                found.append((path.name, node.lineno, "some ranks leave before the others"))
            if isinstance(node, ast.Call):
                written = ast.unparse(node.func)
                if {written, written.split(".")[-1]} & COLLECTIVES:
                    found.append((path.name, node.lineno, written))
    return found


@pytest.mark.parametrize("path", [*RECIPES, *MODULES], ids=by_name)
class TestEachFile:
    def test_every_rank_takes_part_in_every_collective_call(self, path):
        assert find_calls_on_some_ranks(path) == []


def test_every_process_group_says_how_long_it_waits():
    for path in [*RECIPES, *MODULES]:
        for call in (node for node in nodes_of(path) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).split(".")[-1] in ("new_group", "InitProcessGroupKwargs"):
                given = {keyword.arg for keyword in call.keywords}
                assert "timeout" in given, path


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


def test_the_four_settings_of_4_bit_weights_are_never_left_to_defaults():
    settings = {"quant_type", "use_double_quant", "compute_dtype", "quant_storage"}
    found = []
    for path in [*RECIPES, *MODULES]:
        for call in (node for node in nodes_of(path) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith("BitsAndBytesConfig"):
                names = {keyword.arg for keyword in call.keywords} - {"llm_int8_skip_modules"}
                found.append(names)
    four = {"load_in_4bit"} | {f"bnb_4bit_{name}" for name in settings}
    assert sorted(found, key=len) == [{"load_in_8bit"}, four]


def test_a_recipe_imports_no_other_one_and_nothing_of_scripts():
    others = {path.stem for path in RECIPES} | {"scripts"}
    others |= {path.stem for path in (REPO / "scripts").iterdir()}
    for path in RECIPES:
        assert not {name.split(".")[0] for name in imports_of(path)} & others, path.name


def test_modules_know_no_recipe_and_tasks_import_each_other_in_layers():
    """No import leads back: each task has a layer, one above the highest that it imports."""
    for path in MODULES:
        assert not imports_of(path) & {recipe.stem for recipe in RECIPES}
    paths = {f"tasks.{path.stem}": path for path in (REPO / "recipes/tasks").glob("*.py")}
    reached = {name: imports_of(path) & set(paths) for name, path in paths.items()}
    layers = {}
    while len(layers) < len(reached):
        ready = [
            name for name, below in reached.items() if name not in layers and below <= set(layers)
        ]
        assert ready, f"a circle among {sorted(set(reached) - set(layers))}"
        for name in ready:
            layers[name] = 1 + max((layers[below] for below in reached[name]), default=0)


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
