# SPDX-License-Identifier: Apache-2.0
"""Every recipe keeps the promises that recipes/llama.py makes: the same numbers under every engine,
bytes as promised, and a run that a signal stopped continues as if it had not.

Here each is shown under two engines, llama.py under all in test_strategies.py; evidence/parity.py
runs every recipe under every YAML (results/README.md).
"""

import sys
from dataclasses import replace

import pytest

import short_jobs
from launching import REPO, read_metrics, rehearse, run
from proof.faults import Fault
from proof.jobs import CUT, MAKERS, Run
from proof.launch import data_of
from proof.parity_table import measure
from proof.trials.lab import Lab
from proof.trials.outcome import resume_and_compare, status_of, verified
from proof.trials.trial import make_job
from short_jobs import short

RECIPES = [name for name in MAKERS if name != "llama"]
ENGINES = [("fsdp2_full_shard", "full"), ("deepspeed_zero3", "LoRA")]
EVALUATED = {"rel": 1e-5, "abs": 1e-6}  # metrics that count rows are equal


@pytest.mark.parametrize(
    ("config", "kind"), ENGINES, ids=[f"{config}-{kind}" for config, kind in ENGINES]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_give_the_numbers_of_one_process_and_hold_what_was_promised(
    recipe, config, kind, short_of, short_in_one_process, tmp_path
):
    planned = short(Run(recipe, config, 2, *CUT[2], kind, recipe=recipe))
    whole = short_in_one_process(kind, recipe)
    row = measure(planned, short_of(recipe), tmp_path / "run", whole)
    assert row["verdict"] == "ok" and row["bytes"] == "ok", row
    evaluations, expected = read_metrics(tmp_path / "run")[1], read_metrics(whole)[1]
    assert evaluations and evaluations == [pytest.approx(line, **EVALUATED) for line in expected]


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (
            "fsdp2_full_shard",
            ["--load_in_4bit", "--dtype", "bfloat16"],
        ),  # FSDP2 wants one type in a unit
        ("deepspeed_zero3", []),  # DeepSpeed does not cast a model that was loaded into it
    ],
    ids=["4-bit, FSDP2", "ZeRO-3"],
)
def test_a_new_head_beside_adapters_has_their_type_in_bf16(config, base, tiny_of, tmp_path):
    flags = ["--use_peft", *base, "--max_steps", 2, "--output_dir", tmp_path / "run"]
    data, script = data_of(tiny_of("bert")), REPO / "recipes" / "bert.py"
    done = rehearse(config, *data, *flags, num_processes=2, mixed_precision="bf16", script=script)
    assert done.returncode == 0, done.output[-3000:]
    assert len(read_metrics(tmp_path / "run")[0]) == 2 and "shard report: ok" in done.output


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stopped_run_goes_on_as_if_it_had_not(recipe, short_of, shared_tmp, tmp_path):
    lab = Lab(shared_tmp / f"faults_{recipe}", short_of(recipe))
    job = replace(make_job("single"), recipe=recipe, flags=short_jobs.FLAGS)
    folder = tmp_path / "run"
    ended = lab.run(job, folder, [Fault("SIGTERM", "between_steps", call=8)])
    assert ended.code == 75 and status_of(folder)["state"] == "stopped", ended.output[-3000:]
    assert verified(folder) == [7]
    result = resume_and_compare(lab, folder, job)
    assert result.ok, result.note


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_wrong_call_is_one_line_and_64(recipe, tmp_path):
    flags = ["--learning_rate", "-1", "--output_dir", tmp_path / "run"]
    done = run(sys.executable, REPO / "recipes" / f"{recipe}.py", *flags)
    assert done.returncode == 64 and "Traceback" not in done.output, done.output
    assert "--learning_rate -1.0: must be above 0" in done.output
