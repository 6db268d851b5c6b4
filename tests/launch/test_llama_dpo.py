# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_dpo.py as a user runs it: it learns the same on any number of ranks, stops and
resumes, and names bad pairs."""

import json
import os
import sys

import pytest
from huggingface_hub import ModelCard

from launching import REPO, data_of, read_metrics, rehearse, run

RECIPE = REPO / "recipes" / "llama_dpo.py"
SHORT = ["--per_device_train_batch_size", 6, "--max_steps", 8, "--learning_rate", "1e-3"]
REWARDS = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
METRICS = REWARDS | {"logps/chosen", "logps/rejected"}


@pytest.fixture(scope="module")
def tiny(tiny_of):
    return tiny_of("llama_dpo")


@pytest.fixture(scope="module")
def whole_run(tiny, once):
    """The folder of one run without a stop, in one process; and its output."""

    def train(folder):
        done = run(sys.executable, RECIPE, *data_of(tiny), *SHORT, "--output_dir", folder)
        assert done.returncode == 0, done.output[-3000:]
        (folder / "output").write_text(done.output)

    folder = once("whole_dpo", train)
    return folder, (folder / "output").read_text()


def test_it_learns_to_prefer_and_the_result_loads(whole_run):
    from transformers import AutoModelForCausalLM

    folder, output = whole_run
    steps, evaluations = read_metrics(folder)
    assert all(set(line) >= METRICS for line in steps) and set(evaluations[-1]) >= {
        f"eval_{name}" for name in METRICS
    }
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is the reference
    # Three of the four skills can be distinguished by their letters after a few steps; counting
    # takes longer
    assert evaluations[-1]["eval_loss"] < 0.5 and evaluations[-1]["eval_rewards/accuracies"] >= 0.75
    assert "rather than [[" in " ".join(output.split()) and (folder / "run.json").exists()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(whole_run, tiny, tmp_path):
    fault = json.dumps({"do": "SIGTERM", "at": "answer_logps", "step": 5, "rank": 0})
    command = [*data_of(tiny), *SHORT, "--output_dir", tmp_path]
    program = REPO / "scripts" / "proof" / "faults.py"
    environment = os.environ | {"FAULT": fault}
    stopped = run(sys.executable, program, RECIPE, *command, env=environment)
    assert stopped.returncode == 75, stopped.output[-3000:]
    kept = list(tmp_path.glob("reference-*.table"))
    (saved,) = tmp_path.glob("checkpoint-*")
    assert len(kept) == 1
    step = saved.name.removeprefix("checkpoint-")
    # On two ranks, whose weights are shards; the reference is read, not run with trained weights
    # The loss is computed in pieces of 16 tokens.
    flags = ["--per_device_train_batch_size", 3, "--max_logits_mib", 0.02]
    done = rehearse("fsdp2_full_shard", *command, *flags, num_processes=2, script=RECIPE)
    assert done.returncode == 0 and "Reference:" not in done.output, done.output[-3000:]
    ours, theirs = read_metrics(tmp_path), read_metrics(whole_run[0])
    for found, wanted in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        same = {
            "loss",
            "learning_rate",
            "num_input_tokens_seen",
            *METRICS,
            *(f"eval_{name}" for name in METRICS),
        }
        for name in same & set(wanted):  # sums in another order, after eight steps at a high rate
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-4), (
                name,
                wanted["step"],
            )
    card = ModelCard.load(tmp_path / "README.md").text
    assert "| steps | 8 (--max_steps) |" in card and "| 8 | " in card.split("## Loss")[1]
    assert f"| resumed | the last time after step {step} |" in card
    command = card.split("## Command")[1]
    assert "--max_logits_mib 0.02" in command and "--max_steps 8" in command
    assert str(tmp_path) not in card and str(REPO) not in card


def test_the_card_says_what_was_preferred_and_how(whole_run):
    card = ModelCard.load(whole_run[0] / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["accelerate", "dpo"]
    assert "Preference tuning. The loss is per pair: DPO with beta 0.1." in card.text
    evaluated = card.text.split("Evaluation after step 8:")[1].split("Training after step 8:")[0]
    for name in METRICS:
        assert f"| eval_{name} | " in evaluated


def test_adapters_learn_the_same_with_the_reference_run_before_and_in_each_step(tiny, tmp_path):
    for name, flags in (("each", []), ("before", ["--precompute_ref_log_probs"])):
        flags += ["--use_peft", "--eval_strategy", "no", "--output_dir", tmp_path / name]
        done = run(sys.executable, RECIPE, *data_of(tiny), *SHORT, *flags)
        assert done.returncode == 0, done.output[-3000:]
    each, before = (read_metrics(tmp_path / name)[0] for name in ("each", "before"))
    assert [line["loss"] for line in each] == pytest.approx(
        [line["loss"] for line in before], rel=1e-5
    )
    assert each[-1]["rewards/margins"] > 0.1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            [],
            65,
            [
                "pairs.jsonl, line 2: has no text in rejected",
                "line 3: is not JSON",
                "line 4: has the columns",
            ],
        ),
        (["--beta", "0"], 64, ["--beta 0.0: must be above 0"]),
        (["--loss_typ", "ipo"], 64, ["did you mean --loss_type?"]),
    ],
)
def test_what_cannot_be_used_is_named(flags, code, words, tiny, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    good = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    rows.write_text(
        "\n".join([good, good.replace('"c"', '""'), "{", '{"prompt": "a"}', good]) + "\n"
    )
    done = run(
        sys.executable,
        RECIPE,
        "--model_name_or_path",
        tiny / "model",
        "--dataset_name",
        rows,
        *flags,
        "--output_dir",
        tmp_path / "run",
    )
    assert done.returncode == code and all(word in done.output for word in words), done.output[
        -3000:
    ]
    assert "Traceback" not in done.output
