# SPDX-License-Identifier: Apache-2.0
"""An output folder that cannot be written, or has somebody's model, is refused at the start."""

import pytest

from components.folder import WRITTEN, find_problem, predictions_file, remove_predictions_after
from fakes import alone


@pytest.fixture
def began(arguments, start_run):
    """A function from output folder and base model to the exit code, 0 if the run begins."""

    def begin(output_dir, model="gpt2", reaches_data=False):
        arguments.output_dir = str(output_dir)
        arguments.model_name_or_path = str(model)
        code = 0
        try:
            run = start_run(arguments)
            if reaches_data:
                run.start(alone(1))
        except SystemExit as ended:
            code = ended.code
        return code

    return begin


@pytest.mark.parametrize(
    "name", ["file/run", "/proc/nope/x", "n" * 300, "link", "circle/run", "/sys/kernel"]
)
def test_a_folder_that_cannot_be_ends_with_73(name, began, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    assert began(tmp_path / name, reaches_data=True) == 73


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_in_the_place_of_a_file_ends_with_73(name, tmp_path, began):
    (tmp_path / name).mkdir()
    assert began(tmp_path, reaches_data=True) == 73


def test_a_dry_run_makes_no_folder_and_changes_no_file(tmp_path):
    assert find_problem(tmp_path / "not" / "there", dry_run=True) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert find_problem(tmp_path, dry_run=False) is None
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [before]


# ---- A model that an earlier run has not left ----
@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_the_base_model_is_not_overwritten_however_it_is_spelled(model, began, tmp_path):
    (tmp_path / "link").symlink_to(model)
    assert began(model, model) == began(tmp_path / "link", model) == 64
    assert began(model, tmp_path / "link") == began(f"{tmp_path}/run/../model/", model) == 64
    # A hub id, which would be read as this folder once it is there
    assert began(tmp_path / "owner/name", tmp_path / "owner/name") == 64
    (model / "run.json").write_text("{}")  # not even if a run has left it
    assert began(model, model) == 64
    assert (model / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "adapter_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "adapter_model.bin",
    ],
)
def test_a_model_of_anybody_else_is_not_overwritten(name, began, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "checkpoint-500").mkdir()  # Trainer's, which has no manifest
    assert began(tmp_path) == 64


@pytest.mark.parametrize("name", ["run.json", "checkpoint-3/manifest.json"])
def test_the_result_of_a_run_may_be_replaced(name, model, began):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("{}")
    assert began(model) == 0


def test_only_the_predictions_after_a_step_are_removed(tmp_path):
    kept = [predictions_file(tmp_path, 2), predictions_file(tmp_path, 10)]
    kept += [tmp_path / "predictions.jsonl", tmp_path / "predictions-12.jsonl.old"]
    removed = [predictions_file(tmp_path, 11), predictions_file(tmp_path, 100)]
    for path in kept + removed:
        path.touch()
    remove_predictions_after(tmp_path, 10)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
