# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of how others ended, and the exit code of an error of a file."""

import json

import pytest

from components.status import Ending, process_status
from components.watch import Watch
from fakes import Exit

pytestmark = pytest.mark.usefixtures("new_process")


def test_what_an_earlier_run_told_is_not_of_this_one(folder):
    failed = {"state": "failed", "exit_code": 70, "time": "2026-01-01 00:00:00"}
    (folder / "status.json").write_text(json.dumps(failed))
    process_status().began = "2026-01-01 00:00:01"
    assert process_status().reported_by_others() is None
    process_status().began = "2026-01-01 00:00:00"
    assert process_status().reported_by_others() == Ending("failed", 70)


@pytest.mark.parametrize(("path", "code"), [("run/metrics.jsonl", 73), ("rows.jsonl", 1)])
def test_an_error_of_a_file_in_the_output_folder_ends_with_73(path, code, folder, exits):
    error = IsADirectoryError(21, "Is a directory", str(folder / path))
    with pytest.raises(Exit):
        Watch(str(folder / "run")).on_exception(IsADirectoryError, error, None)
    assert exits == [code]
