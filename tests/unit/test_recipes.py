"""A recipe keeps its order, hides nothing behind the rank or the strategy, needs no other file.

Some files beside the recipes are none: a recipe uses them where they are, and trains without them."""

import ast
import re
import sys

import pytest

from launching import REPO, run
from proof.jobs import MAKERS

NAMES = "run_status upstream fault_tolerance head_loss model_weights preflight rows varlen whole_state".split()
COMPANIONS = [REPO / "recipes" / f"{name}.py" for name in NAMES]
CONFIG_COMPONENTS = [
    *sorted((REPO / "recipes" / "components").glob("config_*.py")),
    *(REPO / "recipes" / "components" / f"{name}_keys.py" for name in ("accelerate", "deepspeed")),
    REPO / "recipes" / "components" / "launch_command.py",
    REPO / "recipes" / "components" / "yaml_text.py",
]
USED = {
    "fault_tolerance",
    "head_loss",
    "model_weights",
    "preflight",
    "rows",
}  # by recipes; the others by these
LIGHT = {"run_status", "upstream"}  # used too, before all that takes seconds to import
OF_LANGUAGE_MODELS = {"head_loss"}
RECIPES = sorted(set((REPO / "recipes").glob("*.py")) - set(COMPANIONS))
BANNERS = [
    "Accelerator and seed",
    "Tokenizer and data",
    "Model",
    "Optimizer and schedule",
    "Prepare",
    "Resume",
    "Train",
    "Evaluate and save",
]
COLLECTIVES = {
    "save_state",
    "load_state",
    "get_state_dict",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "reduce",
    "broadcast",
    "barrier",
    "backward",
    "clip_grad_norm_",
    "wait_for_everyone",
    "summed_loss",
    "evaluate",
    "export_model",
    "check_trigger",
    "watch_ranks",
    "find_checkpoint",
    "resume",
    "keep",
    "handle_nonfinite",
    "conclude",
    "leave",
    "save_checkpoint",
    "gather_state",
    "restore_state",
    "stop_asked",
    "broadcast_object_list",
    "check_changes",
    "evaluate_rows",
    "summed_row_loss",
    "share_new_modules",
    "deal",
    "give_up",
    "new_group",
    "summed_target_loss",
    "generate",
    "evaluate_texts",
    "answer_logps",
    "compare_answers",
    "run_reference",
    "evaluate_pairs",
    "keep_table",
    "summed_losses",
    "evaluate_mixture",
    "means_of",
    "make_output_dir",
    "end_if_done",
    "end_as_done",
    "whole_weights",
    "keep_finished_model",
    "get_model_state_dict",
    "load_pretrained",
    "load_on_rank_0",
    "read",
}
LEAVES = (ast.Return, ast.Break, ast.Continue)
PACKAGES = {"PIL": "pillow"}  # where a module has another name
INDIRECT = {
    "numpy",
    "jinja2",
    "tqdm",
    "xxhash",
    "safetensors",
    "psutil",
    "yaml",
}  # the required packages bring them


def tree_of(path):
    return ast.parse(path.read_text())


def function(path, name):
    return next(
        node
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )


def test_the_recipes_are_the_expected_ones():
    assert [path.stem for path in RECIPES] == sorted(MAKERS)
    assert not (REPO / "recipes" / "__init__.py").exists() and all(
        path.exists() for path in COMPANIONS
    )


def run_by_some_ranks(node):
    """What lies in the branches of a condition, of any form, that asks for the rank."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.BoolOp)):
        test = getattr(node, "test", node)
        if re.search("main_process|process_index|RANK", ast.unparse(test)):
            return [
                inner
                for child in ast.iter_child_nodes(node)
                if child is not test
                for inner in ast.walk(child)
            ]
    return []


def imports_of(path):
    """The packages that a file imports, the standard library and what others bring left out."""
    imported = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    return imported - sys.stdlib_module_names - INDIRECT


def missing_from_requirements(packages):
    requirements = (REPO / "requirements.txt").read_text()
    packages = [PACKAGES.get(name, name) for name in packages]
    return [name for name in packages if not re.search(rf"^{name}\b", requirements, re.MULTILINE)]


def check_collectives(path):
    for node in (inner for outer in ast.walk(tree_of(path)) for inner in run_by_some_ranks(outer)):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            assert name not in COLLECTIVES, f"line {node.lineno}: {name} on some ranks alone"
        assert not isinstance(node, LEAVES), (
            f"line {node.lineno}: some ranks leave before the others"
        )


@pytest.mark.parametrize("path", [*COMPANIONS, *CONFIG_COMPONENTS], ids=lambda path: path.name)
def test_a_companion_keeps_the_same_rules_and_knows_no_recipe(path):
    check_collectives(path)
    assert not missing_from_requirements(
        imports_of(path) - {"components", *(companion.stem for companion in COMPANIONS)}
    )
    assert (
        "pickle" not in path.read_text().replace("unpickled", "")
        and "torch.load" not in path.read_text()
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
class TestRecipe:
    def test_needs_nothing_of_the_repository_and_requires_what_it_imports(self, path):
        imported = imports_of(path)
        assert {"accelerate", "transformers", "torch"} <= imported
        assert not missing_from_requirements(imported - USED - LIGHT)
        attempts = [
            node for node in tree_of(path).body if isinstance(node, ast.Try)
        ]  # what it can do without
        used = USED if "def loss_in_head(" in path.read_text() else USED - OF_LANGUAGE_MODELS
        for attempt, names in zip(attempts, (LIGHT, used), strict=True):
            assert ast.unparse(attempt.body) == "\n".join(
                f"import {name}" for name in sorted(names)
            )
            handler = attempt.handlers[0]
            assert ast.unparse(handler.type) == "ModuleNotFoundError"
            assert ast.unparse(handler.body[0]) == " = ".join(sorted(names)) + " = None"

    def test_tells_a_wrong_flag_before_the_imports_that_take_seconds(self, path, tmp_path):
        code = (
            "import atexit, runpy, sys\natexit.register(lambda: print('torch' in sys.modules))\n"
            f"sys.argv = ['x.py', '--output_dir', '{tmp_path}', '--sede', '1']\n"
            f"sys.path.insert(0, '{path.parent}')\nrunpy.run_path('{path}', run_name='__main__')\n"
        )
        done = run(sys.executable, "-c", code)
        assert done.returncode == 64 and "did you mean --seed?" in done.output, done.output
        assert done.output.endswith("False\n") and (tmp_path / "status.json").exists()

    def test_asks_whether_its_companions_are_there_wherever_it_uses_them(self, path):
        tree = tree_of(path)
        asked_for = "|".join(
            [*USED, *LIGHT, "checkpoint"]
        )  # a checkpoint is only ever one that was found
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, (ast.If, ast.BoolOp, ast.IfExp))
            and re.search(rf"\b({asked_for})\b", ast.unparse(getattr(node, "test", node)))
            for inner in ast.walk(node)
        }
        uses = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in USED | LIGHT
        ]
        assert len(uses) >= 12 and all(id(node) in guarded for node in uses)

    def test_main_names_no_strategy_and_keeps_the_order(self, path):
        source = ast.get_source_segment(path.read_text(), function(path, "main")).lower()
        assert not any(word in source for word in ("fsdp", "deepspeed", "distributedtype"))
        banners = re.findall(
            r"# ---- (.*) ----", ast.get_source_segment(path.read_text(), function(path, "main"))
        )
        assert banners == BANNERS

    def test_main_makes_the_same_checks_in_the_same_order(self, path):
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(function(path, "main"))
            if isinstance(node, ast.Call)
        ]
        wanted = [
            "fault_tolerance.start_run",
            "preflight.check_launch",
            "make_accelerator",
            "fault_tolerance.watch_ranks",
            "fault_tolerance.make_output_dir",
            "fault_tolerance.find_checkpoint",
            "preflight.check_changes",
            "fault_tolerance.end_if_done",
            "preflight.report_start",
            "fault_tolerance.resume",
        ]
        source = ast.get_source_segment(path.read_text(), function(path, "main"))
        places = [source.index(f" {name}(") for name in wanted]
        assert places == sorted(places) and all(calls.count(name) == 1 for name in wanted)

    def test_every_rank_takes_part_in_every_collective_call(self, path):
        check_collectives(path)

    def test_the_four_settings_of_4_bit_weights_are_never_left_to_defaults(self, path):
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        calls = [call for call in calls if getattr(call.func, "id", "") == "BitsAndBytesConfig"]
        names = ("quant_type", "use_double_quant", "compute_dtype", "quant_storage")
        settings = {f"bnb_4bit_{name}" for name in names}
        for names in (
            {keyword.arg for keyword in call.keywords} - {"llm_int8_skip_modules"} for call in calls
        ):
            assert names == {"load_in_8bit"} or names == {"load_in_4bit"} | settings

    def test_every_argument_is_explained_and_used(self, path):
        source, arguments = path.read_text(), []
        for node in ast.walk(function(path, "parse_args")):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                arguments.append(node.args[0].value.removeprefix("--"))
                helps = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
                assert helps and helps[0].value and not helps[0].value.endswith("."), arguments[-1]
        assert len(arguments) > 40
        source += "".join(companion.read_text() for companion in COMPANIONS)
        unused = [name for name in arguments if not re.search(rf"args\.{name}\b", source)]
        assert unused == []

    def test_workers_are_told_by_a_function_that_can_be_pickled(self, path):
        tree, told = tree_of(path), []  # from Python 3.14 on workers are not forked
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "worker_init_fn":
                told.append(node.value)
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                told += [
                    value for key, value in pairs if key and ast.unparse(key) == "'worker_init_fn'"
                ]
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert told or "DataLoader(" not in path.read_text()
        assert all(isinstance(value, ast.Name) and value.id in names for value in told)

    def test_every_process_group_waits_as_long_as_the_user_says(self, path):
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        groups = [call for call in calls if getattr(call.func, "attr", "") == "new_group"]
        groups += [
            call for call in calls if getattr(call.func, "id", "") == "InitProcessGroupKwargs"
        ]
        assert groups
        for call in groups:
            timeouts = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
            assert timeouts and "args.ddp_timeout" in ast.unparse(timeouts[0])
