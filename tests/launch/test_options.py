# SPDX-License-Identifier: Apache-2.0
"""Each toggle does what it says: those that must not change the losses do not, the others train and
save."""

import json
import shutil

import pytest
import torch
from accelerate.tracking import get_available_trackers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from components.checkpoint import read_state
from launching import read_metrics, recipe, rehearse

JOB = ["--max_steps", "6", "--per_device_train_batch_size", "8", "--learning_rate", "1e-3"]


def train(tiny, output_dir, *options, rows=None, held_out=None):
    data = ["--dataset_name", rows or tiny / "data" / "train.jsonl"]
    if held_out != "in the folder":
        data += ["--eval_dataset_name", held_out or tiny / "data" / "test.jsonl"]
    done = recipe(
        "--model_name_or_path", tiny / "model", *data, *JOB, "--output_dir", output_dir, *options
    )
    assert done.returncode == 0, done.output[-3000:]
    steps, evaluations = read_metrics(output_dir)
    return [line["loss"] for line in steps], evaluations[-1]["eval_loss"], done.output


@pytest.fixture(scope="module")
def plain(tiny, once):
    """Losses without any option."""
    steps, evaluations = read_metrics(once("plain", lambda folder: train(tiny, folder)))
    return [line["loss"] for line in steps], evaluations[-1]["eval_loss"]


@pytest.mark.parametrize(
    "options",
    [
        ["--optim", "adamw_torch"],
        ["--dataloader_num_workers", "2", "--dataset_num_proc", "2"],
        ["--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "2"],
    ],
    ids=lambda options: " ".join(options),
)
def test_options_that_do_not_change_the_losses(options, tiny, plain, tmp_path):
    losses, eval_loss, _ = train(tiny, tmp_path / "run", *options)
    assert losses == pytest.approx(plain[0], rel=1e-4) and eval_loss == pytest.approx(
        plain[1], rel=1e-4
    )


@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "folder"])
def test_all_file_types_give_the_same_rows(kind, tiny, plain, tmp_path):
    from datasets import Dataset

    lines = (tiny / "data" / "train.jsonl").read_text().splitlines()
    rows, held_out = Dataset.from_list([json.loads(line) for line in lines]), None
    if kind == "folder":
        path, held_out = tiny / "data", "in the folder"  # train.jsonl and test.jsonl
    else:
        path = tmp_path / f"rows.{kind}"
        {"csv": rows.to_csv, "parquet": rows.to_parquet, "json": rows.to_json}[kind](path)
    losses, eval_loss, _ = train(tiny, tmp_path / "run", rows=path, held_out=held_out)
    assert losses == plain[0] and eval_loss == plain[1]


@pytest.mark.parametrize(
    "options",
    [
        ["--optim", "adamw_8bit"],
        ["--use_peft", "--use_rslora", "--use_dora", "--lora_dropout", "0.1"],
        ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"],
        ["--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "fp4"],
        ["--use_peft", "--load_in_4bit", "--gradient_checkpointing"],
        ["--dtype", "bfloat16", "--no_master_weights"],
        ["--no_completion_only_loss", "--no_assistant_only_loss"],
    ],
    ids=lambda options: " ".join(options),
)
def test_options_that_train_otherwise(options, tiny, plain, tmp_path):
    losses, _, _ = train(tiny, tmp_path / "run", *options)
    assert losses[-1] < losses[0] and losses != plain[0]
    if "--use_peft" in options:
        config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
        assert config["use_dora"] == ("--use_dora" in options)
        assert (tmp_path / "run" / "adapter_model.safetensors").stat().st_size > 10_000
    else:
        assert json.loads((tmp_path / "run" / "config.json").read_text())["dtype"] in (
            "float32",
            "bfloat16",
        )


@pytest.mark.parametrize(
    ("flags", "name"), [([], "llama"), (["--run_name", "first try"], "first try")], ids=str
)
def test_a_tracker_gets_the_metrics_under_the_name_of_the_run(flags, name, tiny, tmp_path):
    losses, eval_loss, _ = train(tiny, tmp_path / "run", "--report_to", "tensorboard", *flags)
    events = EventAccumulator(str(tmp_path / "run" / name)).Reload()
    logged = [event.value for event in events.Scalars("loss")]
    assert logged == pytest.approx(losses, rel=1e-6)  # tensorboard keeps them in fp32
    assert events.Scalars("eval_loss")[-1].value == pytest.approx(eval_loss, rel=1e-6)


def test_a_tracker_that_is_not_installed_is_told_before_training(tiny, tmp_path):
    available = {tracker.value for tracker in get_available_trackers()}
    missing = next(name for name in ("wandb", "aim", "swanlab") if name not in available)
    data = ["--dataset_name", tiny / "data" / "train.jsonl", "--output_dir", tmp_path / "run"]
    done = recipe("--model_name_or_path", tiny / "model", *data, "--report_to", missing)
    assert done.returncode == 64 and "Loading weights" not in done.output
    assert f"--report_to {missing} needs a package that is not installed" in done.output


def test_tokenising_runs_once(tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"  # not seen by another test
    rows.write_text((tiny / "data" / "train.jsonl").read_text() + "\n")
    first = train(tiny, tmp_path / "run", rows=rows)[2]
    again = train(tiny, tmp_path / "other", "--seed", "1", rows=rows)[2]
    assert f"Tokenizing {rows}" in first and f"Tokenizing {rows}" not in again


def test_noise_and_a_schedule_with_settings_are_the_same_in_a_resumed_run(tiny, tmp_path):
    folder = tmp_path / "run"
    options = [
        *["--neftune_noise_alpha", "5", "--adam_beta2", "0.95", "--save_steps", "2"],
        *["--lr_scheduler_type", "cosine_with_min_lr"],
        *["--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'],
    ]
    losses, eval_loss, _ = train(tiny, folder, *options)
    for path in (folder / "checkpoint-6", folder / "model.safetensors"):  # as if killed after 4
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again, eval_again, output = train(tiny, folder, *options)
    assert "Continuing from" in output
    assert (again, eval_again) == (losses, eval_loss)


def test_checkpoints_without_optimizer_state_are_small_and_no_run_continues_from_them(
    tiny, tmp_path
):
    folder = tmp_path / "run"
    train(tiny, folder, "--save_only_model", "--save_steps", "3")
    for step in (3, 6):
        names = read_state(folder / f"checkpoint-{step}").keys()
        assert names and not [name for name in names if name.startswith("state.")]
    data = ["--dataset_name", tiny / "data" / "train.jsonl"]
    data += ["--eval_dataset_name", tiny / "data" / "test.jsonl"]
    words = ["--model_name_or_path", tiny / "model", *data, *JOB, "--output_dir", folder]
    words += ["--save_only_model", "--save_steps", "3"]
    assert "Nothing is left to do" in recipe(*words).output
    (folder / "model.safetensors").unlink()  # as if killed before the result was written
    done = recipe(*words)
    assert done.returncode == 64 and "has no optimizer state (--save_only_model)" in done.output


def test_a_module_that_is_trained_whole_is_saved_beside_the_adapters(tiny, tmp_path):
    options = ["--use_peft", "--modules_to_save", "lm_head"]
    losses, eval_loss, _ = train(tiny, tmp_path / "run", *options)
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    [name] = [name for name in saved if "lora" not in name]
    assert "lm_head" in name
    base = load_file(tiny / "model" / "model.safetensors")["lm_head.weight"]
    assert saved[name].shape == base.shape and not torch.equal(saved[name], base)

    data = tiny / "data"
    done = rehearse(
        *["ddp", "--model_name_or_path", tiny / "model", "--dataset_name", data / "train.jsonl"],
        *["--eval_dataset_name", data / "test.jsonl", "--output_dir", tmp_path / "ddp"],
        *[*JOB, *options, "--per_device_train_batch_size", "4"],
        num_processes=2,
    )
    assert done.returncode == 0, done.output[-3000:]
    steps, evaluations = read_metrics(tmp_path / "ddp")
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-4)
    assert evaluations[-1]["eval_loss"] == pytest.approx(eval_loss, rel=1e-4)
