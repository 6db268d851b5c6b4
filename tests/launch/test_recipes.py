"""Every recipe keeps the promises that recipes/llama.py makes.

The numbers are the same under every engine and the bytes as promised, a run that a signal stopped
is resumed as if it had not been, and the file alone, in an empty folder, trains. Here each is shown
under two engines, llama.py under all in test_strategies.py; scripts/parity.py runs every recipe
under every YAML (results/README.md).
"""

import shutil
import sys
from dataclasses import replace

import pytest
from launching import REPO, read_metrics, rehearse, run
from proof.faults import Fault
from proof.jobs import MAKERS, all_runs, run_on_ranks
from proof.launch import data_of
from proof.parity_table import measure
from proof.trials.lab import Lab
from proof.trials.outcome import resume_and_compare, status_of, verified
from proof.trials.trial import make_job

RECIPES = [name for name in MAKERS if name != "llama"]
ENGINES = [("fsdp2_full_shard", "full"), ("deepspeed_zero3", "LoRA")]
EVALUATED = {"rel": 1e-5, "abs": 1e-6}  # metrics that count rows are equal


@pytest.mark.parametrize(
    ("config", "kind"), ENGINES, ids=[f"{config}-{kind}" for config, kind in ENGINES]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_give_the_numbers_of_one_process_and_hold_what_was_promised(
    recipe, config, kind, tiny_of, one_process, tmp_path
):
    planned = run_on_ranks(recipe, config, 2, kind, recipe=recipe)
    assert planned in all_runs()
    whole = one_process(kind, recipe)
    row = measure(planned, tiny_of(recipe), tmp_path / "run", whole)
    assert row["verdict"] == "ok" and row["bytes"] == "ok", row
    _, evaluations = read_metrics(tmp_path / "run")
    _, expected = read_metrics(whole)
    assert evaluations
    assert evaluations == [pytest.approx(line, **EVALUATED) for line in expected]


# FSDP2 wants one type in a unit; DeepSpeed casts nothing of a model that was loaded into it
NEW_HEADS = [
    ("fsdp2_full_shard", ["--load_in_4bit", "--dtype", "bfloat16"]),
    ("deepspeed_zero3", []),
]


@pytest.mark.parametrize(("config", "base"), NEW_HEADS, ids=["4-bit, FSDP2", "ZeRO-3"])
def test_a_new_head_beside_adapters_has_their_type_in_bf16(config, base, tiny_of, tmp_path):
    flags = ["--use_peft", *base, "--max_steps", 2, "--output_dir", tmp_path / "run"]
    words = [*data_of(tiny_of("bert")), *flags]
    script = REPO / "recipes" / "bert.py"
    done = rehearse(config, *words, num_processes=2, mixed_precision="bf16", script=script)
    assert done.returncode == 0, done.output[-3000:]
    assert "shard report: ok" in done.output
    steps, _ = read_metrics(tmp_path / "run")
    assert len(steps) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stopped_run_goes_on_as_if_it_had_not(recipe, tiny_of, one_process, shared_tmp, tmp_path):
    lab = Lab(shared_tmp / f"faults_{recipe}", tiny_of(recipe))
    job = replace(make_job("single"), recipe=recipe)
    folder = tmp_path / "run"
    ended = lab.run(job, folder, [Fault("SIGTERM", "keep", call=8)])
    assert ended.code == 75 and status_of(folder)["state"] == "stopped", ended.output[-3000:]
    assert verified(folder) == [7]
    result = resume_and_compare(lab, folder, job, whole=one_process("full", recipe))
    assert result.ok, result.note


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_file_alone_trains(recipe, tiny_of, tmp_path):
    shutil.copy(REPO / "recipes" / f"{recipe}.py", tmp_path / "train.py")
    words = ["train.py", *data_of(tiny_of(recipe)), "--max_steps", 4, "--output_dir", "run"]
    done = run(sys.executable, *words, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    steps, _ = read_metrics(tmp_path / "run")
    assert len(steps) == 4
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "fault_tolerance.py is not beside this recipe" in done.output


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_wrong_call_is_one_line_and_64(recipe, tmp_path):
    flags = ["--learning_rate", "-1", "--output_dir", tmp_path / "run"]
    done = run(sys.executable, REPO / "recipes" / f"{recipe}.py", *flags)
    assert done.returncode == 64 and "Traceback" not in done.output, done.output
    assert "--learning_rate -1.0: must be above 0" in done.output
