# SPDX-License-Identifier: Apache-2.0
"""A run whose loss, learning or result is wrong has a problem that says so."""

import math

import pytest

from families import judge, launches
from families.judge import problems_of

OWN = 6.0
GOOD = {"losses": [6.0, 5.5, 5.2, 5.0], "trained": 4.9, "loaded": 4.9, "untrained": []}


def test_a_good_run_has_none():
    assert problems_of(OWN, GOOD) == []
    rounded = GOOD | {"losses": [OWN * (1 + 5e-7)], "loaded": 4.9 * (1 - 5e-7)}
    assert problems_of(OWN, rounded) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"losses": [6.00002, 5.5]}, "the first loss is 6.00002, the model's own is 6"),
        ({"losses": [math.nan]}, "the first loss is nan"),
        ({"trained": 6.1, "loaded": 6.1}, "the loss does not fall: 6, then 6.1"),
        ({"loaded": 4.90001}, "the loss of the trained model is 4.9, that of the loaded one 4.90"),
        ({"loaded": math.nan}, "that of the loaded one nan"),
        ({"untrained": ["layers.0.q_proj"]}, "adapters that were not trained: layers.0.q_proj"),
    ],
)
def test_what_is_wrong_is_told(wrong, says):
    found = problems_of(OWN, GOOD | wrong)
    assert any(says in problem for problem in found), found


def test_a_run_that_fails_has_its_reason_and_the_others_go_on(tmp_path, monkeypatch):
    def launch(kind, *_, **__):
        if kind.ranks == 2:
            raise launches.RunFailedError("exit code 64: no")
        return launches.Finished("sdpa", [6.0], 5.0)

    monkeypatch.setattr(judge, "launch", launch)
    monkeypatch.setattr(judge.own_loss, "load", lambda folder, base=None: FakeModel())
    monkeypatch.setattr(judge.own_loss, "read_batch", lambda rows, folder: {})
    monkeypatch.setattr(judge.own_loss, "loss_of", lambda model, batch: 5.0)
    monkeypatch.setattr(judge.own_loss, "effect_of_adapters", lambda model: {"q_proj": True})
    monkeypatch.setattr(judge, "write_model", lambda family, folder: None)
    row = judge.measure("llama", tmp_path, tmp_path, warm=False)
    assert row["verdict"] == "FAILED"
    assert row["problems"][-1] == "FSDP: exit code 64: no"
    assert row["LoRA"]["adapters"] == 1 and "FSDP" not in row


def test_settings_that_transformers_refuses_are_a_problem_too(tmp_path, monkeypatch):
    def refuse(family, folder):
        raise ValueError("heads do not divide\nmore")

    monkeypatch.setattr(judge, "write_model", refuse)
    row = judge.measure("llama", tmp_path, tmp_path, warm=False)
    assert row["problems"] == ["in transformers: ValueError: heads do not divide"]


class FakeModel:
    """As much of a model as `measure` looks at."""

    config = object()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("x\nerror: no such layer\nTraceback", "exit code 64: no such layer"),
        ("Traceback\n  File\nValueError: a\nthe end", "exit code 64: ValueError: a"),
        ("[rank0]: torch.OutOfMemoryError: b\nbye", "exit code 64: [rank0]: torch.OutOfMemory"),
        (
            "ValueError: c\ntorch.distributed.errors.ChildFailedError: \n==",
            "exit code 64: ValueError: c",
        ),
        ("the end", "exit code 64: the end"),
        ("", "exit code 64: "),
    ],
)
def test_the_reason_is_one_line_of_the_output(output, reason):
    assert launches.reason_of(64, output).startswith(reason)


def test_a_run_without_all_of_its_steps_is_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 6.0}\n{"eval_loss": 5.0}\n')
    with pytest.raises(launches.RunFailedError, match="has 1 steps, 1 evaluations"):
        launches.read_run("kernels: attention sdpa", tmp_path)
