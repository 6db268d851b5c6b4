# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_pipeline.py trains as recipes/llama.py does in one process, and each continues the
other's runs."""

import json
import shutil
import sys
from functools import partial

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from components.checkpoint import read_state
from launching import CONFIGS, RECIPE, REPO, data_of, read_metrics, rehearse, run, words_of_plan
from proof.compare import compare, within
from proof.trials.outcome import hash_of_state
from saved_models import loss_of_saved
from tiny import makers

PIPELINE = REPO / "recipes" / "llama_pipeline.py"
STEPS = 20
SHAPE = "--hidden_size 64 --intermediate_size 128 --num_attention_heads 2 --num_hidden_layers 4"
ROWS = "--num_train_rows 70 --num_test_rows 9"
# Rows of different lengths, whose prompts are not trained on; clipping takes effect in each step
JOB = [
    *f"--max_steps {STEPS} --num_train_epochs 3 --save_steps 10 --save_total_limit 9".split(),
    *"--learning_rate 1e-3 --warmup_steps 0.1 --lr_scheduler_type cosine".split(),
    *"--weight_decay 0.1 --max_grad_norm 0.5".split(),
    # 70 rows do not divide by 8: the last window of an epoch has batches with few rows or none
    *"--gradient_accumulation_steps 2".split(),
]
# fp32 rounds at 6e-8; sums of another order, over other parts, differ by a few times that
BOUNDS = {"loss": 1e-6, "grad_norm": 1e-5, "learning_rate": 0.0, "weights": 1e-5}
EVALUATED = {"rel": 1e-6}
ZERO_BUBBLE = ["--pipeline_schedule", "interleaved_zero_bubble"]
CASES = {  # ranks, whether the model is tied, flags
    "2 stages, tied": (2, True, []),
    "2 stages, GPipe": (2, False, ["--pipeline_schedule", "gpipe"]),
    "4 stages": (4, False, ["--pp_size", "4"]),
    "2 stages, 2 replicas, tied": (4, True, []),
    "interleaved, 2 replicas": (4, False, ["--pipeline_schedule", "interleaved"]),
    "zero bubble, sharded, tied": (4, True, ["--shard_stages", *ZERO_BUBBLE]),
    "ZBV, sharded": (4, False, ["--shard_stages", "--pipeline_schedule", "zbv"]),
}


@pytest.fixture(scope="session")
def small_of(once):
    """A function from whether a model is tied to the folder of that model and its rows."""

    def make(is_tied, folder):
        flags = ["--tie_word_embeddings"] if is_tied else []
        makers.make("llama", folder, [*SHAPE.split(), *ROWS.split(), *flags])

    return lambda is_tied: once(f"small_{is_tied}", partial(make, is_tied))


@pytest.fixture(scope="session")
def in_one_process(once, small_of):
    """A function from whether a model is tied to the run of recipes/llama.py in one process."""

    def train(is_tied, folder):
        flags = [*JOB, "--per_device_train_batch_size", 4, "--output_dir", folder]
        done = rehearse("single", *data_of(small_of(is_tied)), *flags)
        assert done.returncode == 0, done.output[-3000:]

    return lambda is_tied: once(f"one_process_{is_tied}", partial(train, is_tied))


@pytest.fixture(scope="session")
def over_pipeline(once, small_of):
    """A function from a case to its finished run."""

    def train(case, folder):
        done = run_case(case, small_of, folder)
        assert done.returncode == 0, done.output[-3000:]

    return lambda case: once(f"pipeline {case}", partial(train, case))


def run_case(case, small_of, folder, *more):
    """Run a case into a folder, and return how it ended."""
    ranks, is_tied, flags = CASES[case]
    pipelines = ranks // (4 if "4 stages" in case else 2)
    flags = [*JOB, *flags, "--per_device_train_batch_size", 4 // pipelines, *more]
    data = data_of(small_of(is_tied))
    words = [*data, *flags, "--output_dir", folder]
    return rehearse("pp", *words, num_processes=ranks, script=PIPELINE)


def take_over(run, folder):
    """Make a folder as the run was after its step 10."""
    folder.mkdir()
    shutil.copytree(run / "checkpoint-10", folder / "checkpoint-10")
    shutil.copy(run / "metrics.jsonl", folder)


def assert_agrees(folder, whole):
    found = compare(folder, whole)
    assert within(found, BOUNDS), found
    evaluations, expected = read_metrics(folder)[1], read_metrics(whole)[1]
    assert [line["step"] for line in evaluations] == [line["step"] for line in expected]
    for ours, theirs in zip(evaluations, expected, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], **EVALUATED)


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_gives_the_numbers_of_one_process(case, over_pipeline, in_one_process):
    folder = over_pipeline(case)
    whole = in_one_process(CASES[case][1])
    assert_agrees(folder, whole)
    counts = [
        [line["num_input_tokens_seen"] for line in read_metrics(run)[0]] for run in (folder, whole)
    ]
    assert counts[0] == counts[1]
    assert max(line["grad_norm"] for line in read_metrics(folder)[0]) > 0.5  # It was clipped
    names = read_state(folder / "checkpoint-20").keys()
    assert names == read_state(whole / "checkpoint-20").keys()


@pytest.mark.parametrize("case", ["2 stages, tied", "ZBV, sharded"])
def test_a_run_that_continues_ends_bit_for_bit_as_if_it_had_not_stopped(
    case, over_pipeline, small_of, tmp_path
):
    whole = over_pipeline(case)
    folder = tmp_path / "run"
    take_over(whole, folder)
    done = run_case(case, small_of, folder)
    assert done.returncode == 0 and "Continuing from" in done.output, done.output[-3000:]
    assert "shard report: ok" in done.output, done.output[-3000:]
    assert hash_of_state(folder, 20) == hash_of_state(whole, 20)
    saved = sorted(path.name for path in whole.glob("model*.safetensors"))
    assert len(saved) > 1  # one for each stage, or more
    for name in saved:
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_llama_py_continues_the_run_of_a_pipeline(
    over_pipeline, in_one_process, small_of, tmp_path
):
    folder = tmp_path / "run"
    take_over(over_pipeline("ZBV, sharded"), folder)
    flags = [*JOB, "--per_device_train_batch_size", 2, "--output_dir", folder]
    data = data_of(small_of(False))
    done = rehearse("fsdp2_full_shard", *data, *flags, num_processes=2, script=RECIPE)
    assert done.returncode == 0, done.output[-3000:]
    assert "made with PP 2 x FSDP2 2 on 4 ranks" in done.output
    assert_agrees(folder, in_one_process(False))


def test_a_pipeline_continues_the_run_of_llama_py(in_one_process, small_of, tmp_path):
    folder = tmp_path / "run"
    whole = in_one_process(True)
    take_over(whole, folder)
    done = run_case("2 stages, tied", small_of, folder, "--pipeline_schedule", "interleaved")
    assert done.returncode == 0, done.output[-3000:]
    assert "made with one process" in done.output
    assert_agrees(folder, whole)


def test_the_result_loads_and_has_the_loss_of_the_last_evaluation(over_pipeline, small_of):
    folder = over_pipeline("zero bubble, sharded, tied")
    evaluated = read_metrics(folder)[1][-1]["eval_loss"]
    loss = loss_of_saved(folder, "full", small_of(True))
    assert loss == pytest.approx(evaluated, rel=1e-5)  # Rows are not padded here
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_dry_run_describes_the_whole_model_and_writes_nothing(small_of, tmp_path):
    done = run_case("4 stages", small_of, tmp_path / "run", "--dry_run")
    assert done.returncode == 0, done.output[-3000:]
    said = " ".join(done.output.split())
    assert "strategy: PP 4, 4 x cpu" in said
    assert "4 stages of 1 + 1 + 1 + 1 layers on 4 ranks, 1f1b, each batch in 4 micro-" in said
    assert "4 rows x 2 batches x 1 pipeline = 8 rows per step" in said
    model = AutoModelForCausalLM.from_pretrained(small_of(False) / "model")
    assert f"{model.num_parameters():,} parameters" in said
    assert "Loading weights" not in done.output and not (tmp_path / "run").exists()
    plan = words_of_plan(done.output)
    plan[plan.index("--config_file") + 1] = CONFIGS / "pp.yaml"  # A warm start does not know it
    planned = run(sys.executable, *plan, "--json", tmp_path / "plan.json")
    assert planned.returncode == 0, planned.output[-3000:]
    assert len(json.loads((tmp_path / "plan.json").read_text())["ranks"]) == 4


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        ("pp", ["--pp_size", 3], "error: --pp_size 3 does not divide 2 ranks: use --pp_size 2"),
        ("fsdp2_full_shard", [], "error: FSDP2 FULL_SHARD does not shard a pipeline: use pp.yaml"),
        (
            "pp",
            ["--pipeline_schedule", "zbv", "--model_name_or_path", "SHALLOW"],
            "--pp_size 2 with zbv makes 4 stages, and the model has 3 layers: use "
            "--pipeline_schedule 1f1b",
        ),
        (
            "pp",
            ["--model_name_or_path", "OTHER"],
            "GPT2LMHeadModel cannot be cut into stages, since it has no embed_tokens",
        ),
    ],
    ids=["ranks", "FSDP", "layers", "family"],
)
def test_what_cannot_be_a_pipeline_is_refused_before_the_weights_are_loaded(
    config, flags, says, small_of, tmp_path
):
    models = {"SHALLOW": ("llama", {"num_hidden_layers": 3}), "OTHER": ("gpt2", {})}
    for name in set(models) & set(map(str, flags)):
        folder = tmp_path / name
        shutil.copytree(small_of(False) / "model", folder)
        kind, changes = models[name]
        old = AutoConfig.from_pretrained(folder)
        if kind != "llama":
            old = AutoConfig.for_model(kind, vocab_size=old.vocab_size)
        old.update(changes)
        old.save_pretrained(folder)
        flags = [folder if flag == name else flag for flag in flags]
    words = [*data_of(small_of(False)), *flags, "--output_dir", tmp_path / "run"]
    done = rehearse(config, *words, num_processes=2, script=PIPELINE)
    assert done.returncode == 64, done.output[-3000:]
    assert says in done.output and "Loading weights" not in done.output
    assert done.output.count("error: ") >= 1 and "Traceback (most" not in done.output.split(says)[0]
