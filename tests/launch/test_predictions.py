# SPDX-License-Identifier: Apache-2.0
"""--predict_with_generate of recipes/llama.py: the same answers under every strategy, and the same
training with and without them.

Nine rows in batches of four leave the second of two ranks without rows in its last batch.
"""

import json
import shutil
import sys
from functools import partial

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launching import REPO, data_of, read_metrics, recipe, rehearse, run

NUM_ROWS = 9
LONGEST = 12  # tokens; under ZeRO-3 each of them gathers all layers
JOB = [
    *"--max_steps 4 --eval_strategy steps --eval_steps 2 --learning_rate 2e-3".split(),
    *"--per_device_eval_batch_size 4 --save_steps 0".split(),
]
PREDICT = [
    *f"--predict_with_generate --num_predictions {NUM_ROWS}".split(),
    *f"--generation_max_new_tokens {LONGEST}".split(),
]
CONFIGS = [
    "ddp",
    "fsdp1_full_shard",
    "fsdp2_full_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
]
# What draws random numbers, and what treats a model in training differently
DRAWING = "--use_peft --lora_dropout 0.1 --neftune_noise_alpha 5 --gradient_checkpointing".split()


@pytest.fixture(scope="module")
def tiny(short_of):
    return short_of("llama")


def train(tiny, folder, *flags):
    done = recipe(*data_of(tiny), *JOB, "--per_device_train_batch_size", 6, *flags, *to(folder))
    assert done.returncode == 0, done.output[-4000:]
    return done.output


def train_under(config, tiny, folder, *flags):
    words = [*data_of(tiny), *JOB, "--per_device_train_batch_size", 3, *flags, *to(folder)]
    done = rehearse(config, *words, num_processes=2)
    assert done.returncode == 0 and "shard report: ok" in done.output, done.output[-4000:]


def to(folder):
    return ["--output_dir", folder]


def answers_of(folder, step):
    text = (folder / f"predictions-{step}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def numbers_of(folder):
    """What training computed: nothing of it depends on time."""
    steps, evaluations = read_metrics(folder)
    numbers = [(line["loss"], line["grad_norm"]) for line in steps]
    return numbers, [line["eval_loss"] for line in evaluations]


@pytest.fixture(scope="module")
def one(tiny, once):
    """The folder of a run in one process."""
    return once("predictions_of_one", lambda folder: train(tiny, folder, *PREDICT))


@pytest.fixture(scope="module")
def under(tiny, once):
    """A function from a YAML to the folder of the same run on two ranks."""

    def folder_of(config):
        fill = partial(fill_under, config, tiny)
        return once(f"predictions_of_{config}", fill)

    return folder_of


def fill_under(config, tiny, folder):
    train_under(config, tiny, folder, *PREDICT)


@pytest.mark.parametrize("config", CONFIGS)
def test_ranks_give_the_answers_of_one_process(config, one, under):
    folder = under(config)
    for step in (2, 4):
        assert answers_of(folder, step) == answers_of(one, step)
    metrics, expected = (read_metrics(path)[1] for path in (folder, one))
    assert [line["eval_exact_match"] for line in metrics] == [
        line["eval_exact_match"] for line in expected
    ]


def test_each_row_is_answered_once_from_the_prompt_of_training(one, tiny):
    rows = [json.loads(line) for line in (tiny / "data" / "test.jsonl").read_text().splitlines()]
    answers = answers_of(one, 2)
    numbers = [line["row"] for line in answers]
    assert len(set(numbers)) == NUM_ROWS and numbers == sorted(numbers)
    for line in answers:
        row = rows[line["row"] - 1]
        assert line["reference"] == row["completion"]
        assert f"<|user|>{row['prompt']}<|" in line["prompt"]
        assert line["prompt"].endswith("<|assistant|>")
        assert line["correct"] == (line["answer"] == line["reference"])
    assert len({line["answer"] for line in answers_of(one, 2)}) > 2  # not one answer for all


def test_the_last_answers_are_those_of_the_folder(one, tiny, tmp_path):
    """scripts/generate.py renders the prompts by itself, without a row's answer."""
    words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", LONGEST]
    program = REPO / "scripts" / "generate.py"
    done = run(sys.executable, program, one, *words, "--output", tmp_path / "answers.jsonl")
    assert done.returncode == 0, done.output[-3000:]
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    expected = [json.loads(line)["answer"] for line in lines]
    for line in answers_of(one, 4):
        assert line["answer"] == expected[line["row"] - 1]


def test_training_is_the_same_bit_for_bit_without_answers(tiny, tmp_path):
    train(tiny, tmp_path / "with", *DRAWING, *PREDICT)
    train(tiny, tmp_path / "without", *DRAWING)
    assert numbers_of(tmp_path / "with") == numbers_of(tmp_path / "without")
    adapters = [
        (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("with", "without")
    ]
    assert adapters[0] == adapters[1]
    assert not list((tmp_path / "without").glob("predictions-*"))


def test_shards_train_the_same_bit_for_bit_without_answers(under, tiny, tmp_path):
    train_under("fsdp2_full_shard", tiny, tmp_path / "run")
    assert numbers_of(tmp_path / "run") == numbers_of(under("fsdp2_full_shard"))


def test_a_resumed_run_writes_the_same_answers_and_shows_them(tiny, tmp_path):
    folder = tmp_path / "run"
    best = ["--load_best_model_at_end", "--metric_for_best_model", "exact_match"]
    words = [
        *PREDICT,
        *best,
        "--save_steps",
        2,
        "--report_to",
        "tensorboard",
        "--run_name",
        "board",
    ]
    output = train(tiny, folder, *words)
    assert output.count("(should be: ") == 6  # three at each evaluation
    assert "Best evaluation: eval_exact_match" in output
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    shown = board.Tensors("predictions/text_summary")
    assert [event.step for event in shown] == [2, 4]
    assert answers_of(folder, 4)[0]["reference"] in shown[1].tensor_proto.string_val[0].decode()

    before = {step: answers_of(folder, step) for step in (2, 4)}
    shutil.rmtree(folder / "checkpoint-4")  # as if it had been killed after step 2
    (folder / "model.safetensors").unlink()
    (folder / "predictions-4.jsonl").write_text("half a li")
    (folder / "predictions-6.jsonl").write_text("of an earlier, longer run")
    output = train(tiny, folder, *words)
    assert "Continuing from" in output
    assert {step: answers_of(folder, step) for step in (2, 4)} == before
    assert not (folder / "predictions-6.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--predict_with_generate needs rows to evaluate on"),
        (
            ["--eval_split", "10", "--no_completion_only_loss"],
            "--predict_with_generate needs rows with a prompt",
        ),
    ],
    ids=["no rows", "no prompts"],
)
def test_what_cannot_be_answered_is_refused_in_one_line(flags, says, tiny, tmp_path):
    data = ["--model_name_or_path", tiny / "model"]
    data += ["--dataset_name", tiny / "data" / "train.jsonl"]
    done = recipe(*data, *JOB, *PREDICT, *flags, *to(tmp_path / "run"))
    assert done.returncode == 64 and says in done.output, done.output[-3000:]
    assert "Traceback" not in done.output
