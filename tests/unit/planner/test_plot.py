# SPDX-License-Identifier: Apache-2.0
"""`plan_memory.py --plot` draws the plans, or says in one line why it cannot."""

import sys

import pytest

import plan_memory
from planner_jobs import BASE, config_of


@pytest.mark.parametrize(("name", "code"), [("plan.png", 0), ("plan.sheep", 73)])
def test_a_picture_of_the_plans_is_written(name, code, tmp_path, monkeypatch):
    config_of(BASE | {"width": 128, "depth": 2, "vocab": 1000}).save_pretrained(tmp_path)
    words = f"--gpu 24GB --num_gpus 2 --plot {tmp_path / name} {tmp_path} --max_length 64"
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *words.split()])
    assert plan_memory.main() == code
    assert (tmp_path / name).exists() == (code == 0)
