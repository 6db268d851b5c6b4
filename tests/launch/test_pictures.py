# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/pictures are what their command draws from results/ and the planner."""

import pytest

import pictures
from launching import REPO


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_command_draws(name):
    drawn = (REPO / "docs" / "pictures" / f"{name}.svg").read_text()
    assert pictures.draw(name) == drawn, f"python evidence/pictures.py {name}"
    assert "prefers-color-scheme: dark" in drawn
