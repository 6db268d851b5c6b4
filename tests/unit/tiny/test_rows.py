# SPDX-License-Identifier: Apache-2.0
"""The rows of the makers can be learned, and no training row gives away a test row."""

import re

from tiny import llama


def subject(row: dict[str, str]) -> str:
    """Return the word or number that a row of skills asks about."""
    for skill in llama.SKILLS:
        if skill.name == row["skill"]:
            pattern = re.escape(skill.question).replace(r"\{\}", "(.+)")
            return re.fullmatch(pattern, row["prompt"])[1]
    raise AssertionError(row)


def test_no_test_row_of_skills_asks_about_what_is_trained_on():
    files = llama.make_rows(2000, 70, seed=0)
    assert [len(rows) for rows in files.values()] == [2000, 70]
    held_out = {subject(row) for row in files["test"]}
    assert len(held_out) == 20  # ten words, ten numbers
    assert not held_out & {subject(row) for row in files["train"]}
