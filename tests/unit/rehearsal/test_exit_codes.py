# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rehearsal end with the code on which they agree, and with their own otherwise."""

import pytest

from rehearsal import ranks
from rehearsal.ranks import agree, code_of_all


@pytest.fixture(autouse=True)
def without_patience(monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    monkeypatch.setattr(ranks, "PATIENCE_AFTER_FAILURE", 0.05)


def record(folder, *codes):
    for rank, code in enumerate(codes):
        (folder / f"exit.{rank}").write_text(str(code))


@pytest.mark.parametrize("others", [[75], [""], []], ids=["another code", "half written", "none"])
def test_a_rank_with_which_the_others_do_not_agree_ends_with_its_own_code(others, tmp_path):
    record(tmp_path, *others)
    assert agree(70, tmp_path, len(others), 2) == 70


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
    record(tmp_path, *codes)
    assert code_of_all(launcher_code, tmp_path, 2) == code
