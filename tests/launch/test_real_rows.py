# SPDX-License-Identifier: Apache-2.0
"""A 2M-parameter Llama trains on GSM8K under one process, FSDP and ZeRO-3: the loss falls, alike
in all."""

import json
import math

import pytest

from launching import read_metrics, rehearse

# {config: (ranks, rows per device, accumulation steps)}
CUTS = {"single": (1, 8, 1), "fsdp": (2, 2, 2), "deepspeed_zero3": (2, 4, 1)}
JOB = "--max_length 512 --max_steps 20 --learning_rate 1e-3 --warmup_steps 5".split()


def train(config, gsm8k, model, output_dir, held_out):
    ranks, batch, accumulation = CUTS[config]
    words = ["--model_name_or_path", model, "--dataset_name", gsm8k / "train.jsonl"]
    words += ["--eval_dataset_name", held_out, "--output_dir", output_dir, *JOB]
    words += ["--per_device_train_batch_size", batch]
    words += ["--gradient_accumulation_steps", accumulation]
    done = rehearse(config, *words, num_processes=ranks)
    assert done.returncode == 0, done.output[-3000:]
    return done.output


@pytest.fixture(scope="module")
def reference(gsm8k, gsm8k_model, shared_tmp, once):
    """The run in one process, launched once, and 64 held-out rows."""
    held_out = shared_tmp / "held_out.jsonl"

    def launch(folder):
        held_out.write_text(
            "".join((gsm8k / "test.jsonl").read_text().splitlines(keepends=True)[:64])
        )
        output = train("single", gsm8k, gsm8k_model, folder, held_out)
        assert "7473, " in output and "64, 0 truncated" in output

    return held_out, read_metrics(once("real_rows", launch))


@pytest.mark.parametrize("config", CUTS)
def test_real_rows_train(config, gsm8k, gsm8k_model, reference, tmp_path):
    held_out, (expected, expected_evaluations) = reference
    if config == "single":
        steps, evaluations = expected, expected_evaluations
    else:
        train(config, gsm8k, gsm8k_model, tmp_path, held_out)
        steps, evaluations = read_metrics(tmp_path)
    losses = [line["loss"] for line in steps]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1.5
    assert losses == pytest.approx([line["loss"] for line in expected], rel=1e-4)
    perplexity = evaluations[-1]["eval_perplexity"]
    assert (
        perplexity == pytest.approx(math.exp(evaluations[-1]["eval_loss"]))
        and 1 < perplexity < 1000
    )
    assert perplexity == pytest.approx(expected_evaluations[-1]["eval_perplexity"], rel=1e-3)
    assert json.dumps(evaluations)  # plain numbers
