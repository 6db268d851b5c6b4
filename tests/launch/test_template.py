# SPDX-License-Identifier: Apache-2.0
"""A recipe is a template: one command copies it into a folder that needs nothing else
from this repository."""

import json
import os
import sys

import pytest

from launching import REPO, data_of, read_metrics, run
from proof.jobs import MAKERS

AS_A_USER = pytest.mark.cold("as a user starts a copy")
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
        done = run(sys.executable, REPO / "scripts" / "copy_recipe.py", recipe, folder)
        assert done.returncode == 0, done.output
        return folder

    return copy


@pytest.mark.parametrize(
    ("recipe", "weights", "adapters"),
    [
        *((recipe, "model.safetensors", []) for recipe in MAKERS),
        ("t5", "adapter_model.safetensors", ["--use_peft"]),
    ],
)
def test_a_copy_trains_in_its_own_folder_only(
    recipe, weights, adapters, copied, short_of, tmp_path
):
    folder = copied(recipe)
    (tmp_path / "watch.py").write_text(WATCH.format(folder=folder))
    flags = ["--max_steps", 3, "--save_steps", 2, "--output_dir", "run", *adapters]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, tmp_path / "watch.py", folder / f"{recipe}.py"]
    done = run(*command, *data_of(short_of(recipe)), *flags, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.output[-3000:]
    assert "foreign: []" in done.output, done.output[-1000:]
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(steps) == 3 and len(evaluations) == 1
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert (tmp_path / "run" / weights).is_file()


@AS_A_USER
def test_a_stopped_copy_continues_as_if_it_had_not(copied, tiny, tmp_path):
    folder = copied("llama")
    flags = [*data_of(tiny), "--max_steps", 6, "--save_steps", 0, "--eval_strategy", "no"]
    recipe = [folder / "llama.py", *flags]
    whole = run(sys.executable, *recipe, "--output_dir", "whole", cwd=folder)
    assert whole.returncode == 0, whole.output[-3000:]
    fault = json.dumps({"do": "SIGTERM", "at": "summed_loss", "step": 3})
    faults = REPO / "scripts" / "proof" / "faults.py"
    environment = os.environ | {"FAULT": fault}
    stopped = run(
        sys.executable, faults, *recipe, "--output_dir", "run", cwd=folder, env=environment
    )
    assert stopped.returncode == 75, stopped.output[-3000:]
    continued = run(sys.executable, *recipe, "--output_dir", "run", cwd=folder)
    assert continued.returncode == 0 and "Continuing from" in continued.output, continued.output
    names = [folder / name / "model.safetensors" for name in ("whole", "run")]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.parametrize(
    ("fault", "steps"),
    [({"do": "nan", "row": 17}, 30), ({"do": "inf gradient", "call": 6}, 6)],
    ids=["loss", "gradient at the end"],
)
def test_a_copy_stops_at_numbers_that_are_not_finite(fault, steps, copied, tiny, tmp_path):
    recipe = [copied("llama") / "llama.py", *data_of(tiny), "--max_steps", steps]
    environment = os.environ | {"FAULT": json.dumps(fault | {"at": "summed_loss"})}
    faults = REPO / "scripts" / "proof" / "faults.py"
    words = [sys.executable, faults, *recipe, "--output_dir", "run"]
    done = run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 70 and "is not finite" in done.output, done.output[-3000:]
    assert "Traceback" not in done.output
    assert not (tmp_path / "run" / "model.safetensors").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["exit_code"] == 70


@AS_A_USER
def test_a_wrong_flag_of_a_copy_is_one_line(copied):
    folder = copied("bert")
    done = run(sys.executable, "bert.py", "--learning_rat", 3, cwd=folder)
    assert done.returncode == 64 and "did you mean --learning_rate?" in done.output
    assert "Traceback" not in done.output
