# SPDX-License-Identifier: Apache-2.0
"""Continued pre-training as a user starts it: it learns, resumes with the next token on any number
of ranks, and names a bad document in the middle of a run; a copied recipe trains by itself.
"""

import json
import os
import shutil
import sys

import pytest
from safetensors.torch import load_file

from launching import REPO, read_metrics, rehearse, run
from paths import CONFIGS
from proof.compare import BOUNDS

RECIPE = REPO / "recipes" / "mistral_pretrain.py"
# Each step has 12 blocks of 48 tokens from a stream of 210 texts, read through windows of 16 texts.
# A step ends within a text, a window and a pass over the texts.
JOB = [
    "--max_length",
    48,
    "--streaming",
    "--shuffle_buffer_size",
    16,
    "--max_train_tokens",
    16 * 12 * 48,
    "--learning_rate",
    1e-3,
    "--warmup_steps",
    0.1,
    "--save_steps",
    0,
]
CUT = {1: (3, 4), 2: (3, 2)}  # ranks: per-device batch, accumulation
TIMES = ("tokens_per_second", "elapsed_seconds", "peak_memory_gib")


@pytest.fixture(scope="module")
def tiny(tiny_of):
    return tiny_of("mistral_pretrain")


def arguments(tiny, ranks=1, data=None):
    batch, accumulation = CUT[ranks]
    data = data or tiny / "data" / "train.jsonl"
    return [
        "--model_name_or_path",
        tiny / "model",
        "--dataset_name",
        data,
        "--eval_dataset_name",
        tiny / "data" / "test.jsonl",
        "--per_device_train_batch_size",
        batch,
        "--gradient_accumulation_steps",
        accumulation,
        *JOB,
    ]


def train(tiny, folder, *flags, faults=(), data=None):
    """One plain process, with planted faults."""
    command = [
        sys.executable,
        REPO / "scripts" / "proof" / "faults.py",
        RECIPE,
        *arguments(tiny, data=data),
    ]
    return run(
        *command,
        "--output_dir",
        folder,
        *flags,
        env=os.environ | {"FAULT": json.dumps(faults, default=str)},
    )


def lines_of(folder):
    """metrics.jsonl, but for speed and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def rows_of(path, ranks):
    """{step: numbers of the documents of its micro-batches, in the order of dealing}."""
    steps = {}
    for rank in range(ranks):
        for line in (path.parent / f"{path.name}.{rank}").read_text().splitlines():
            line = json.loads(line)
            steps.setdefault(line["step"], [[] for _ in range(ranks)])[rank].append(line["rows"])
    return {
        step: [batch for dealt in zip(*parts, strict=True) for batch in dealt]
        for step, parts in steps.items()
    }


def recorded(path):
    return {"do": "record rows", "at": "summed_loss", "file": path}


@pytest.fixture(scope="module")
def whole(tiny, once):
    """A run that nothing stopped, and the documents of its batches."""

    def launch(folder):
        folder.mkdir()
        done = train(tiny, folder / "run", "--eval_on_start", faults=[recorded(folder / "rows")])
        assert done.returncode == 0, done.output[-3000:]

    folder = once("whole_pretraining", launch)
    return folder / "run", rows_of(folder / "rows", 1)


@pytest.fixture(scope="module")
def stopped(tiny, once):
    """The same run, asked to stop in its seventh step."""

    def launch(folder):
        done = train(
            tiny,
            folder,
            "--eval_on_start",
            faults=[{"do": "SIGTERM", "at": "summed_loss", "step": 7}],
        )
        assert done.returncode == 75, done.output[-3000:]

    return once("stopped_pretraining", launch)


def test_perplexity_falls_and_the_budget_is_kept(whole):
    folder, _ = whole
    steps, (before, after) = read_metrics(folder)
    assert [step["num_input_tokens_seen"] for step in steps] == [
        48 * 12 * step for step in range(1, 17)
    ]
    # At random it is that of 512 equal tokens and more; after 9,216 tokens the model knows the
    # common words
    assert before["eval_perplexity"] > 400 and after["eval_perplexity"] < 60
    assert before["step"] == 0 and after["step"] == 16


def test_the_result_continues_a_text(whole):
    script = REPO / "scripts" / "continue_text.py"
    done = run(sys.executable, script, whole[0], "--prompt", "Lamo is a", "--max_new_tokens", 4)
    assert done.returncode == 0 and "Lamo is a ->" in done.output, done.output[-2000:]


def test_a_stop_by_signal_and_the_same_command_again_change_nothing(tiny, whole, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    progress = json.loads((folder / "checkpoint-7" / "progress.json").read_text())
    place = progress["stream"]
    assert (
        place["document"] % 16 and place["token"] and place["reader"]
    )  # within a window and a document
    done = train(tiny, folder, "--eval_on_start")
    assert done.returncode == 0 and "Continuing from" in done.output, done.output[-3000:]
    assert lines_of(folder) == lines_of(whole[0])
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, whole[0]))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_two_ranks_go_on_with_the_same_global_batches(tiny, whole, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    command = [
        REPO / "recipes" / "mistral_pretrain.py",
        *arguments(tiny, ranks=2),
        "--output_dir",
        folder,
    ]
    fault = json.dumps(recorded(tmp_path / "rows"), default=str)
    script = [
        sys.executable,
        REPO / "scripts" / "rehearse.py",
        "--config_file",
        CONFIGS / "ddp.yaml",
    ]
    script += ["--num_processes", 2, REPO / "scripts" / "proof" / "faults.py"]
    done = run(*script, *command, "--eval_on_start", env=os.environ | {"FAULT": fault})
    assert done.returncode == 0, done.output[-3000:]
    seen = rows_of(tmp_path / "rows", 2)
    assert sorted(seen) == list(range(8, 17)) and all(seen[step] == whole[1][step] for step in seen)
    ours, theirs = lines_of(folder), lines_of(whole[0])
    for a, b in zip(ours, theirs, strict=True):  # losses are summed in another order, in fp32
        assert a == pytest.approx(b, rel=BOUNDS["loss"] * 5)


def test_a_bad_document_in_the_middle_of_a_run_ends_it_with_65_and_a_checkpoint(tiny, tmp_path):
    lines = (tiny / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    lines[79] = '{"text": "Lamo is\n'
    data, folder = tmp_path / "train.jsonl", tmp_path / "run"
    data.write_text("".join(lines))
    done = train(tiny, folder, data=data)
    error = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert done.returncode == 65 and "Traceback" not in done.output, done.output[-3000:]
    assert (
        len(error) == 1
        and f"{data}, line 80: is not JSON" in error[0]
        and "--skip_bad_rows" in error[0]
    )
    saved = [int(path.name[11:]) for path in folder.glob("checkpoint-*")]
    assert saved == [read_metrics(folder)[0][-1]["step"]]
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 65
    done = train(tiny, folder, "--skip_bad_rows", "--allow_change", "skip_bad_rows", data=data)
    assert done.returncode == 0 and "because they could not be used: 1" in done.output, done.output[
        -3000:
    ]
    assert f"Continuing from {folder / f'checkpoint-{saved[0]}'}" in done.output


def test_two_ranks_end_with_the_last_token_of_the_last_pass(tiny, tmp_path):
    flags = ["--num_train_epochs", 2, "--max_length", 80]
    data = tmp_path / "train.jsonl"
    data.write_text(
        "".join((tiny / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:40])
    )
    command = [*arguments(tiny, ranks=2, data=data), *flags]
    done = rehearse(
        "ddp", *command, "--output_dir", tmp_path / "two", num_processes=2, script=RECIPE
    )
    assert done.returncode == 0 and "passes: 2; documents in the current pass: 0;" in done.output, (
        done.output[-3000:]
    )
    one = run(
        sys.executable,
        RECIPE,
        *arguments(tiny, data=data),
        *flags,
        "--output_dir",
        tmp_path / "one",
    )
    assert one.returncode == 0, one.output[-3000:]
    ours, theirs = lines_of(tmp_path / "two"), lines_of(tmp_path / "one")
    size = [b["num_input_tokens_seen"] for b in theirs if "loss" in b]
    assert size[-1] - (size[-2] if len(size) > 1 else 0) < 12 * 80  # the last step is a shorter one
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=BOUNDS["loss"] * 5)
