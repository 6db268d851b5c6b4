# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/ passes a dry run under its YAML, with a model of the true shape, and a
finished run is repeated from its run.json."""

import shutil

import pytest

from launching import REPO, data_of, read_json, recipe, rehearse
from publish import examples, public_models

EXAMPLES = {example.path.stem: example for example in examples.read_examples()}
MOST_RANKS = 2  # CPU ranks that a rehearsal starts for eight GPUs
FEW_ROWS = {"mistral_pretrain": ["--num_eval_documents", "20"]}  # the tiny data has few documents


@pytest.fixture
def shaped(tiny, tmp_path):
    """A function from an example to a folder with a config of its model's shape.

    The folder has a tiny tokenizer and no weights, which a dry run does not load.
    """

    def folder_of(example):
        folder = tmp_path / "model"
        public_models.config_of(example.args.model_name_or_path).save_pretrained(folder)
        for path in (tiny / "model").glob("*token*"):
            shutil.copy(path, folder)
        for path in (tiny / "model").glob("*.jinja"):
            shutil.copy(path, folder)
        return folder

    return folder_of


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_a_dry_run(name, shaped, tiny_of, tmp_path):
    example = EXAMPLES[name]
    rows = tiny_of(example.recipe) / "data" / "train.jsonl"
    done = rehearse(
        (REPO / example.config_file).stem,
        *("--config", example.path, "--dry_run", "--output_dir", tmp_path / "run"),
        *("--model_name_or_path", shaped(example), "--dataset_name", rows),
        *FEW_ROWS.get(example.recipe, []),
        num_processes=min(example.num_processes, MOST_RANKS),
        script=f"recipes/{example.recipe}.py",
    )
    if done.returncode == 73:  # the last thing that is checked, after all else
        assert "bytes are needed for checkpoints and result" in done.output
    else:
        assert done.returncode == 0 and "Dry run" in done.output, done.output[-3000:]


def test_a_run_is_repeated_from_its_run_json_and_a_changed_flag_wins(tiny, tmp_path):
    job = [*data_of(tiny), "--max_steps", "2", "--save_steps", "0", "--seed", "7", "--use_peft"]
    done = recipe(*job, "--output_dir", tmp_path / "first")
    assert done.returncode == 0, done.output[-3000:]
    replay = ["--config", tmp_path / "first" / "run.json"]
    done = recipe(*replay, "--output_dir", tmp_path / "again")
    assert done.returncode == 0, done.output[-3000:]
    first = read_json(tmp_path / "first" / "run.json")["arguments"]
    again = read_json(tmp_path / "again" / "run.json")["arguments"]
    assert again == first | {"output_dir": str(tmp_path / "again")}
    weights = "adapter_model.safetensors"
    trained = (tmp_path / "first" / weights).read_bytes()
    assert (tmp_path / "again" / weights).read_bytes() == trained
    done = recipe(*replay)  # all the same, the folder of the run included
    assert done.returncode == 0 and "Nothing is left to do" in done.output, done.output[-3000:]
    done = recipe(*replay, "--seed", "8")
    assert done.returncode == 64 and "seed" in done.output, done.output[-3000:]
