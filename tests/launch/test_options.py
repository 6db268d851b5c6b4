"""Each toggle does what it says: those that must not change the losses do not, the others train and
save."""

import json

import pytest

from launching import read_metrics, recipe

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


def test_a_tracker_gets_the_metrics(tiny, tmp_path):
    train(tiny, tmp_path / "run", "--report_to", "tensorboard")
    assert list((tmp_path / "run").glob("**/events.out.tfevents*"))


def test_tokenising_runs_once(tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"  # not seen by another test
    rows.write_text((tiny / "data" / "train.jsonl").read_text() + "\n")
    first = train(tiny, tmp_path / "run", rows=rows)[2]
    again = train(tiny, tmp_path / "other", "--seed", "1", rows=rows)[2]
    assert f"Tokenizing {rows}" in first and f"Tokenizing {rows}" not in again
