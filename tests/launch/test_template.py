# SPDX-License-Identifier: Apache-2.0
"""A recipe is a template: one command copies it into a folder that needs nothing else from here."""

import json
import os
import sys

import pytest

import net
from jobs import RECIPES
from launching import read_metrics, run

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

    def copy(recipe):
        folder = tmp_path / "my_project"
        done = run(sys.executable, net.ROOT / "scripts" / "copy_recipe.py", recipe, folder)
        assert done.returncode == 0, done.output
        return folder

    return copy


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_trains_in_its_own_folder_only(recipe, copied, net_tiny, tmp_path):
    folder = copied(recipe)
    (tmp_path / "watch.py").write_text(WATCH.format(folder=folder))
    flags = ["--max_steps", 3, "--save_steps", 2, "--output_dir", "run"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, tmp_path / "watch.py", folder / f"{recipe}.py"]
    done = run(*command, *net.data_of(net_tiny(recipe)), *flags, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.output[-3000:]
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


@pytest.mark.cold("as a user starts a copy")
def test_a_stopped_copy_with_its_own_optimizer_continues_as_if_it_had_not(copied, net_tiny):
    folder = copied("llama")
    path = folder / "core" / "model.py"
    text = path.read_text()
    made = "torch.optim.AdamW(groups, fused=is_fused, **settings)"
    assert text.count(made) == 1
    path.write_text(text.replace(made, "Slowing(groups, **settings)") + OWN_OPTIMIZER)
    recipe = [folder / "llama.py", *net.data_of(net_tiny("llama")), "--max_steps", 6]
    recipe += ["--save_steps", 0, "--eval_strategy", "no", "--output_dir"]
    whole = run(sys.executable, *recipe, "whole", cwd=folder)
    assert whole.returncode == 0, whole.output[-3000:]
    fault = json.dumps([{"at": "step 3", "do": "SIGTERM"}])
    environment = os.environ | {"FAULT_IN_LIBRARIES": fault}
    stopped = run(sys.executable, net.INJECTOR, *recipe, "run", cwd=folder, env=environment)
    assert stopped.returncode == 75, stopped.output[-3000:]
    continued = run(sys.executable, *recipe, "run", cwd=folder)
    assert continued.returncode == 0 and "Continuing from" in continued.output, continued.output
    names = [folder / name / "model.safetensors" for name in ("whole", "run")]
    assert names[0].read_bytes() == names[1].read_bytes()
    wrong = run(sys.executable, *recipe, "run", "--learning_rat", 3, cwd=folder)
    assert wrong.returncode == 64 and "Traceback" not in wrong.output
