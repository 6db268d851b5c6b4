# SPDX-License-Identifier: Apache-2.0
"""recipes/t5.py as a user starts it: it learns, ranks agree on texts, and bad rows are named.

Resume: test_recipes.py.
"""

import json
import sys

import numpy as np
import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from launching import REPO, data_of, read_metrics, run
from proof.jobs import CUT, Run
from proof.parity_table import measure

RECIPE = REPO / "recipes" / "t5.py"
METRICS = ["eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_bleu", "eval_exact_match"]


@pytest.fixture(scope="module")
def tiny(tiny_of):
    return tiny_of("t5")


def texts_of(folder):
    return [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_two_ranks_write_the_texts_of_one_process(tiny, one_process, tmp_path):
    """Under FSDP1, where generation needs gathered what is in no layer.

    Under others test_recipes.py sees to it that ROUGE, BLEU and exact match are those of one
    process.
    """
    job = Run("t5", "fsdp1_full_shard", 2, *CUT[2], recipe="t5")
    reference = one_process("full", "t5")
    row = measure(job, tiny, tmp_path / "run", reference)
    assert row["verdict"] == "ok", row
    ours, theirs = (texts_of(folder) for folder in (tmp_path / "run", reference))
    assert ours == theirs and [line["row"] for line in ours] == list(range(1, 22))
    assert len({line["prediction"] for line in ours}) > 5  # not one text for all
    ours, theirs = (read_metrics(folder)[1] for folder in (tmp_path / "run", reference))
    assert [[line[name] for name in METRICS] for line in ours] == [
        [line[name] for name in METRICS] for line in theirs
    ]


def test_it_learns_to_translate_and_the_folder_writes_what_was_evaluated(tmp_path):
    run(
        sys.executable,
        REPO / "scripts" / "make_tiny.py",
        "t5",
        tmp_path,
        "--num_train_rows",
        4000,
        check=True,
    )
    flags = "--learning_rate 2e-3 --warmup_steps 0.05 --per_device_train_batch_size 32 "
    flags += "--num_train_epochs 2 --max_target_length 16 --eval_on_start"
    words = [*data_of(tmp_path), *flags.split(), "--output_dir", tmp_path / "run"]
    done = run(sys.executable, RECIPE, *words)
    assert done.returncode == 0, done.output[-3000:]
    before, *_, after = read_metrics(tmp_path / "run")[1]
    assert before["eval_exact_match"] == 0 and before["eval_bleu"] < 5
    assert (
        after["eval_exact_match"] >= 90 and after["eval_bleu"] >= 90 and after["eval_rougeL"] >= 95
    )
    texts = texts_of(tmp_path / "run")
    right = [line["prediction"] == line["target"] for line in texts]
    assert after["eval_exact_match"] == pytest.approx(100 * np.mean(right))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    inputs = tokenizer([line["source"] for line in texts[:20]], return_tensors="pt", padding=True)
    tokens = model.generate(**inputs, max_new_tokens=16)
    assert tokenizer.batch_decode(tokens, skip_special_tokens=True) == [
        line["prediction"] for line in texts[:20]
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            '{"source": "the dog sees a ship", "target": ""}',
            "rows.jsonl, line 2: has no target text in target",
        ),
        (
            '{"source": "the dog sees a ship"}',
            "rows.jsonl, line 2: has the columns source; needs source and target",
        ),
    ],
)
def test_a_bad_row_is_named(line, says, tiny, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"source": "a", "target": "b"}}\n{line}\n')
    data = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    done = run(sys.executable, RECIPE, *data, "--output_dir", tmp_path / "run")
    assert done.returncode == 65 and says in done.output and "--skip_bad_rows" in done.output, (
        done.output[-3000:]
    )
    assert "Traceback" not in done.output


def test_without_texts_it_trains_adapters_and_evaluates_the_loss(tiny, tmp_path):
    flags = ["--max_steps", 2, "--use_peft", "--max_target_length", 8, "--no-predict_with_generate"]
    flags += ["--output_dir", tmp_path / "run"]
    done = run(sys.executable, RECIPE, *data_of(tiny), *flags)
    assert done.returncode == 0, done.output[-3000:]
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(steps) == 2 and set(evaluations[-1]) == {"step", "eval_loss"}
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "predictions.jsonl").exists()
    card = ModelCard.load(tmp_path / "run" / "README.md")  # in the place of peft's own
    assert card.data.library_name == "peft" and "lora" in card.data.tags
    assert "Sequence to sequence. The loss is per token of a target" in card.text
    assert "AutoPeftModelForSeq2SeqLM.from_pretrained" in card.text
    assert "More Information Needed" not in card.text
