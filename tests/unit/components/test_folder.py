# SPDX-License-Identifier: Apache-2.0
"""An output folder that cannot be written is found at the start, in one line."""

import pytest

from components import status
from components.folder import (
    WRITTEN,
    find_problem,
    predictions_file,
    remove_predictions_after,
)
from components.status import process_status
from components.watch import Watch
from fakes import alone

pytestmark = pytest.mark.usefixtures("new_process")


class TestOutputFolder:
    @pytest.fixture
    def problem(self, arguments, start_run, monkeypatch, capsys):
        """A function from an output folder to the exit code and the message."""
        monkeypatch.setattr(Watch, "join", lambda *_: None)

        def problem(folder):
            arguments.output_dir = str(folder)
            with pytest.raises(SystemExit) as ended:
                start_run(arguments).start(alone(1))
            return ended.value.code, capsys.readouterr().err

        return problem

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("file/run", "Not a directory"),
            ("/sys/run", ""),
            ("/proc/nope/x", "No such file or directory"),
            ("n" * 300, "File name too long"),
            ("link", "is a link to nowhere, which is not there"),
            ("circle/run", "symbolic links"),
            ("/sys/kernel", "cannot write to /sys/kernel: "),
        ],
        ids=lambda value: value[:9],
    )
    def test_one_that_cannot_be_is_one_line_and_73(self, name, words, folder, problem, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("nowhere")
        (tmp_path / "circle").symlink_to("circle")
        path = tmp_path / name
        process_status.cache_clear()
        code, said = problem(path)
        assert (
            code == 73
            and said.startswith(f"error: --output_dir {path}: ")
            and len(said.splitlines()) == 1
        )
        assert words in said

    @pytest.mark.parametrize("name", WRITTEN)
    def test_a_folder_in_the_place_of_a_file_is_found_at_the_start(self, name, folder, problem):
        (folder / name).mkdir()
        code, said = problem(folder)
        assert code == 73 and f"cannot write to {folder / name}: Is a directory" in said

    def test_what_is_there_stays_as_it_is(self, folder):
        (folder / "metrics.jsonl").write_text("{}\n")
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert find_problem(folder, dry_run=False) is None
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    def test_a_dry_run_makes_no_folder_and_looks_at_the_one_above(
        self, tmp_path, arguments, problem
    ):
        arguments.dry_run = True
        assert find_problem(tmp_path / "not" / "there", dry_run=True) is None
        assert list(tmp_path.iterdir()) == []
        code, said = problem("/sys/kernel/run/one")
        assert code == 73 and "cannot write to /sys/kernel: " in said


class TestModelAtRisk:
    """A result overwrites no model that an earlier run has not left."""

    @pytest.fixture
    def refused(self, arguments, start_run, monkeypatch, capsys):
        """A function from the output folder and the base model to the message of a refusal, or
        None if the run begins."""
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

        def refused(output_dir, model="gpt2"):
            process_status.cache_clear()
            arguments.output_dir = str(output_dir)
            arguments.model_name_or_path = str(model)
            try:
                start_run(arguments)
            except SystemExit as ended:
                assert ended.code == 64
                return capsys.readouterr().err
            return None

        return refused

    @pytest.fixture
    def model(self, tmp_path):
        path = tmp_path / "model"
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"weights")
        return path

    @pytest.mark.parametrize("dry_run", [True, False])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_base_model_is_not_overwritten(
        self, rank, dry_run, model, refused, arguments, become_rank, monkeypatch
    ):
        monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
        become_rank(rank)
        arguments.dry_run = dry_run
        said = refused(model, model)
        assert said.startswith(f"error: --output_dir {model}: is the folder of --model_name_or_pa")
        assert said.endswith("choose another --output_dir\n") and len(said.splitlines()) == 1
        assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]

    def test_links_and_other_spellings_lead_to_the_same_folder(self, model, refused, tmp_path):
        (tmp_path / "link").symlink_to(model)
        assert "--model_name_or_path" in refused(tmp_path / "link", model)
        assert "--model_name_or_path" in refused(model, tmp_path / "link")
        assert "--model_name_or_path" in refused(f"{tmp_path}/run/../model/", model)
        # A hub id, which would be read as this folder once it is there
        assert "--model_name_or_path" in refused(tmp_path / "owner/name", tmp_path / "owner/name")

    @pytest.mark.parametrize(
        "name",
        [
            "config.json",
            "adapter_config.json",
            "model.safetensors",
            "adapter_model.safetensors",
            "model-00001-of-00002.safetensors",
            "pytorch_model.bin",
            "pytorch_model-00001-of-00002.bin",
            "adapter_model.bin",
        ],
    )
    def test_a_model_of_anybody_else_is_not_overwritten(self, name, refused, tmp_path):
        (tmp_path / name).touch()
        (tmp_path / "checkpoint-500").mkdir()  # Trainer's, which has no manifest
        said = refused(tmp_path)
        assert f"has a model ({name}) but no run.json" in said and len(said.splitlines()) == 1

    @pytest.mark.parametrize("name", ["run.json", "checkpoint-3/manifest.json"])
    def test_the_result_of_a_run_may_be_replaced(self, name, model, refused):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
        assert refused(model) is None


def test_only_the_predictions_after_a_step_are_removed(tmp_path):
    kept = [predictions_file(tmp_path, 2), predictions_file(tmp_path, 10)]
    kept += [tmp_path / "predictions.jsonl", tmp_path / "predictions-12.jsonl.old"]
    removed = [predictions_file(tmp_path, 11), predictions_file(tmp_path, 100)]
    for path in kept + removed:
        path.touch()
    remove_predictions_after(tmp_path, 10)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
