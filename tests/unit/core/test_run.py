# SPDX-License-Identifier: Apache-2.0
"""What may change when a run continues, and what a call does to a run that is done."""

import json
import shutil
from types import SimpleNamespace

import pytest
from accelerate.utils import LoggerType

from core.cli import may_change
from core.exits import End, fail
from core.metrics import find_missing_tracker
from core.stop import Status
from core.weights import fingerprint_of_weights
from fakes import fake_accelerator
from launching import read_json

FACTS = {"rows_per_step": 8, "data": "abc"}
ROWS = SimpleNamespace(fingerprint="abc")


def plan_of(total_steps, rows_per_step):
    return SimpleNamespace(total_steps=total_steps, rows_per_step=rows_per_step, lengths=None)


@pytest.fixture
def resumed(start_run, arguments, tmp_path):
    """A function from step and arguments of the checkpoint's run to a resumed run."""

    def resumed(step, before):
        if arguments.output_dir == "runs/llama":
            arguments.output_dir = str(tmp_path)
        run = start_run(arguments)
        run._accelerator, run._group = fake_accelerator(print=print), None
        run._checkpoint = tmp_path / f"checkpoint-{step}"
        run._restored = {"step": step, "arguments": before}
        run.step = step
        return run

    return resumed


class TestChanges:
    # tests/golden/flags.json has which flags may change when a run continues
    @pytest.mark.parametrize("name", ["learning_rate", "lora_r", "data"])
    def test_what_changes_the_run_is_refused(self, name, arguments, resumed):
        run = resumed(3, vars(arguments) | FACTS | {name: "another"})
        with pytest.raises(SystemExit, match="64") as ended:
            run.check_plan(plan_of(9, 8), ROWS)
        assert f"--allow_change {name}" in ended.value.why
        arguments.allow_change = [name]
        run.check_plan(plan_of(9, 8), ROWS)

    def test_adapters_of_another_base_are_refused(self, arguments, resumed, tiny, tmp_path):
        base = shutil.copytree(tiny / "model", tmp_path / "base")
        arguments.use_peft = True
        arguments.model_name_or_path = str(base)
        recorded = fingerprint_of_weights(str(tiny / "model"), "main")
        run = resumed(3, vars(arguments) | FACTS | {"base_weights": recorded})
        run.check_plan(plan_of(9, 8), ROWS)  # a copy is the same
        (base / "model.safetensors").write_bytes(b"other weights")
        with pytest.raises(SystemExit, match="64") as ended:
            run.check_plan(plan_of(9, 8), ROWS)
        assert "base_weights" in ended.value.why

    def test_another_number_of_rows_a_step_is_refused(self, arguments, resumed):
        run = resumed(3, vars(arguments) | {"rows_per_step": 24, "data": "abc"})
        with pytest.raises(SystemExit, match="64"):
            run.check_plan(plan_of(9, 7), ROWS)

    def test_a_best_model_is_not_chosen_by_evaluations_of_other_rows(self, arguments, resumed):
        arguments.load_best_model_at_end = True
        run = resumed(3, vars(arguments) | FACTS | {"eval_data": "before"})
        with pytest.raises(SystemExit, match="64") as ended:
            run.check_plan(plan_of(9, 8), ROWS, ROWS)
        assert "--allow_change eval_data" in ended.value.why

    def test_arguments_that_an_older_recipe_had_not_are_no_change(self, arguments, resumed):
        before = vars(arguments) | FACTS
        del before["use_dora"]
        resumed(3, before).check_plan(plan_of(9, 8), ROWS)

    def test_the_rest_may_change(self, arguments, resumed):
        before = vars(arguments) | FACTS | dict.fromkeys(may_change(type(arguments)), "another")
        resumed(3, before).check_plan(plan_of(9, 8), ROWS)


@pytest.mark.parametrize(
    ("name", "word"),
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet_ml")],
)
def test_a_tracker_that_is_not_installed_is_named(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    found = list(find_missing_tracker(SimpleNamespace(report_to=name)))
    assert len(found) == bool(word) and all(word in line for line in found)


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_start_over(arguments, resumed, tmp_path):
    run = resumed(0, {})
    run._checkpoint = None
    damaged = tmp_path / "checkpoint-5"
    damaged.mkdir()
    with pytest.raises(SystemExit, match="65"):
        run._find_checkpoint()
    assert damaged.is_dir()


def test_a_refused_or_failed_call_leaves_a_run_done(arguments, start_run, tmp_path):
    done = {"state": "done", "exit_code": 0, "why": None, "step": 9}
    (tmp_path / "status.json").write_text(json.dumps(done))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "run.json").write_text("{}")
    arguments.output_dir = str(tmp_path)
    with pytest.raises(SystemExit, match="65"), start_run(arguments):
        fail(65, "no such file")
    assert read_json(tmp_path / "status.json") == done


def test_of_several_failures_the_first_is_recorded(tmp_path):
    status = Status(tmp_path)
    status.write("starting")
    assert status.end(End(65, "no such file", is_alone=True))
    assert not status.end(End(1, "the connection is closed", is_alone=True))
    assert read_json(tmp_path / "status.json")["exit_code"] == 65
    status.write("stopped", 75)  # by a signal before the first step, at which others then fail
    assert not status.end(End(1, "the connection is closed", is_alone=True))
    assert read_json(tmp_path / "status.json")["exit_code"] == 75
