"""A recipe is a template: one file, copied elsewhere, trains there; with its companion it keeps checkpoints too."""

import json
import os
import shutil
import sys

import pytest

from launching import REPO, data_of, read_metrics, run

pytestmark = pytest.mark.cold("as a user starts a copy")
COMPANIONS = (
    "run_status",
    "fault_tolerance",
    "whole_state",
    "preflight",
    "rows",
    "varlen",
    "model_weights",
    "head_loss",
    "upstream",
)


@pytest.mark.parametrize("companions", [(), COMPANIONS], ids=["alone", "with its companions"])
def test_a_copied_recipe_trains(companions, tiny, tmp_path):
    shutil.copy(REPO / "recipes" / "llama.py", tmp_path / "train.py")
    for name in companions:
        shutil.copy(REPO / "recipes" / f"{name}.py", tmp_path)
    if companions:
        shutil.copytree(REPO / "recipes" / "components", tmp_path / "components")
    command = [sys.executable, "train.py", *data_of(tiny), "--max_steps", 4, "--output_dir", "run"]
    done = run(*command, *(("--save_steps", 2) if companions else ()), cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    assert (
        len(read_metrics(tmp_path / "run")[0]) == 4
        and (tmp_path / "run" / "model.safetensors").exists()
    )
    assert ("fault_tolerance.py is not beside this recipe" in done.output) != bool(companions)
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == (2 if companions else 0)


@pytest.mark.parametrize("missing", ["run_status", "upstream", "model_weights", "varlen"])
def test_a_copy_with_some_of_its_companions_stops_and_names_the_missing_one(
    missing, tiny, tmp_path
):
    shutil.copy(REPO / "recipes" / "llama.py", tmp_path / "train.py")
    for name in COMPANIONS:
        if name != missing:
            shutil.copy(REPO / "recipes" / f"{name}.py", tmp_path)
    shutil.copytree(REPO / "recipes" / "components", tmp_path / "components")
    told = tmp_path / "told.json"  # as several ranks have it, whose launcher's report comes last
    done = run(
        sys.executable,
        "train.py",
        *data_of(tiny),
        "--output_dir",
        "run",
        cwd=tmp_path,
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(told)},
    )
    assert done.returncode == 64, done.output[-3000:]
    says = f" lies beside this recipe, and the module {missing} is missing: copy all"
    assert (
        says in done.output and "Traceback" not in done.output and not (tmp_path / "run").exists()
    )
    if missing not in ("run_status", "upstream"):  # by which it tells the launcher
        assert says in json.loads(told.read_text())["message"]["extraInfo"]["py_callstack"]


NAN_LOSS, INF_GRADIENT = {"do": "nan", "row": 17}, {"do": "inf gradient", "call": 6}


@pytest.mark.parametrize(
    ("fault", "steps"), [(NAN_LOSS, 30), (INF_GRADIENT, 6)], ids=["loss", "gradient at the end"]
)
def test_a_recipe_that_was_copied_alone_stops_at_numbers_that_are_not_finite(
    fault, steps, tiny, tmp_path
):
    shutil.copy(REPO / "recipes" / "llama.py", tmp_path / "train.py")
    command = [
        sys.executable,
        REPO / "scripts" / "proof" / "faults.py",
        "train.py",
        *data_of(tiny),
        "--max_steps",
        steps,
    ]
    fault = json.dumps(fault | {"at": "summed_loss"})
    done = run(*command, "--output_dir", "run", cwd=tmp_path, env=os.environ | {"FAULT": fault})
    assert done.returncode == 70 and "is not finite" in done.output, done.output[-3000:]
    assert "Traceback" not in done.output and not (tmp_path / "run" / "model.safetensors").exists()
