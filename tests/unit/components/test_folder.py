# SPDX-License-Identifier: Apache-2.0
"""An output folder that cannot be written is found at the start, in one line."""

import pytest

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


def test_only_the_predictions_after_a_step_are_removed(tmp_path):
    kept = [predictions_file(tmp_path, 2), predictions_file(tmp_path, 10)]
    kept += [tmp_path / "predictions.jsonl", tmp_path / "predictions-12.jsonl.old"]
    removed = [predictions_file(tmp_path, 11), predictions_file(tmp_path, 100)]
    for path in kept + removed:
        path.touch()
    remove_predictions_after(tmp_path, 10)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
