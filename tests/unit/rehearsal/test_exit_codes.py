# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rehearsal end with the code on which they agree, and with their own otherwise."""

import pytest

from rehearsal.ranks import code_of_all, record


def test_a_launcher_is_told_of_a_crash_only(tmp_path):
    assert [record(code, tmp_path / "exit.0") for code in (0, 75, 1)] == [0, 0, 1]
    assert (tmp_path / "exit.0").read_text() == "1"


@pytest.mark.parametrize(
    ("codes", "launcher_code", "code"),
    [
        ([75, 75], 0, 75),
        ([75, 75], 1, 75),
        ([0, 0], 1, 1),
        ([0, 75], 0, 1),
        ([75], 1, 1),
        ([], 0, 1),
        ([1, 1], 1, 1),
        ([0, 65], 1, 65),
        ([64], -9, 64),
    ],
)
def test_a_rehearsal_ends_with_what_all_recorded_or_with_a_refusal_of_one(
    codes, launcher_code, code, tmp_path
):
    for rank, recorded in enumerate(codes):
        record(recorded, tmp_path / f"exit.{rank}")
    assert code_of_all(launcher_code, tmp_path, 2) == code
