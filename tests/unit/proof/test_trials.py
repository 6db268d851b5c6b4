# SPDX-License-Identifier: Apache-2.0
"""The trials of fault injection are those of the report, and compare what they say they compare."""

import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import llama
from components.shuffling import shuffled
from launching import REPO
from proof.damage import make_checkpoint
from proof.faults import SHORT_NAMES, find_target
from proof.trials import random_kills, writes
from proof.trials.groups import GROUPS, trials_of
from proof.trials.lab import Launch
from proof.trials.nonfinite import row_of_step
from proof.trials.outcome import last_line, last_step, unequal
from proof.trials.report import report
from proof.trials.running import attempt, line_of, spread, with_earlier
from proof.trials.signals import PLACES
from proof.trials.trial import KILLS, Group, Result, Trial, failed, make_job

RESULTS = json.loads((REPO / "results" / "fault_injection.json").read_text())
DATES = {"date": "2026-11-23", "device": "CPU", "versions": {}}


def trial(what="stopped", detail="step 1", result=None):
    return Trial(what, detail, lambda lab, folder: result)


# ---- Which trials there are ----


def test_the_report_is_that_of_the_results():
    again = "python evidence/fault_injection.py --groups --report docs/fault_injection.md"
    assert report(RESULTS) == (REPO / "docs" / "fault_injection.md").read_text(), again


@pytest.mark.parametrize("group", GROUPS)
def test_every_trial_of_the_results_kept_its_promise(group):
    broken = [trial for trial in RESULTS[group]["trials"] if not trial["ok"]]
    assert broken == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_kind_of_trial_of_a_group_was_done(group):
    trials = trials_of(group, KILLS)
    if group == "disk" and not trials:
        pytest.skip("no file system can be mounted here")
    lines = {line_of(group, one) for one in trials}
    assert len(lines) == len(trials)  # no two have one name
    kinds = {one.what for one in trials}
    assert kinds == {one["what"] for one in RESULTS[group]["trials"]}


@pytest.mark.parametrize("name", [*SHORT_NAMES, *(place.at for place in PLACES.values())])
def test_faults_are_planted_in_functions_that_exist(name):
    target = find_target(name, llama)
    assert callable(getattr(target.owner, target.name))


@pytest.mark.parametrize(("kills", "of_groups"), [(200, (30, 10)), (40, (6, 2)), (0, (0, 0))])
def test_three_quarters_of_the_random_kills_are_of_one_process(kills, of_groups):
    details = [one.what for one in trials_of("random kills", kills)]
    assert details.count("kill -9 of all processes at random, single") == of_groups[0]
    assert details.count("kill -9 of all processes at random, ddp") == of_groups[1]


def test_a_fifth_as_many_random_kills_are_of_runs_with_saves_in_the_background():
    waiting = trials_of("random kills", KILLS)
    in_background = trials_of("random kills, --async_save", KILLS)
    assert sum(one.count for one in waiting) == KILLS == 200
    assert sum(one.count for one in in_background) == 40
    assert {one.what.rpartition(", ")[2] for one in in_background} == {"single", "ddp"}


class KilledLaunch:
    """A run that was killed before its end, after it has logged a step."""

    def __init__(self, folder, step):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1}}\n')

    def ends_within(self, seconds):
        return False

    def kill(self):
        pass


@pytest.mark.parametrize(
    ("in_background", "step", "ok"),
    [(False, 6, True), (False, 7, False), (True, 8, True), (True, 9, False)],
)
def test_a_kill_may_cost_one_interval_between_saves_or_two_if_saves_are_in_the_background(
    in_background, step, ok, tmp_path, monkeypatch
):
    make_checkpoint(tmp_path / "run", 4)
    lab = FakeLab(tmp_path)
    lab.uninterrupted = lambda job: tmp_path
    (tmp_path / "seconds").write_text("10")
    lab.start = lambda job, folder, flags: KilledLaunch(folder, step)
    monkeypatch.setattr(random_kills, "resume_and_compare", lambda *a, **b: Result(True))
    result = random_kills.kill_at_random(
        lab, tmp_path / "run", make_job(), 2, 1, seed=0, in_background=in_background
    )
    assert (result.ok, result.figure) == (ok, step - 4)


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_limit_spreads_over_the_trials_of_each_kind_from_first_to_last(limit):
    trials = [trial("a", str(i)) for i in range(5)] + [trial("b", "0")]
    chosen = [one.detail for one in spread(trials, limit) if one.what == "a"]
    expected = {1: "0", 2: "04", 3: "024", 4: "0124"}
    assert "".join(chosen) == expected.get(limit, "01234")
    assert [one.detail for one in spread(trials, limit) if one.what == "b"] == ["0"]


def test_without_a_limit_all_trials_are_chosen():
    trials = [trial("a", str(i)) for i in range(5)] + [trial("b", "0")]
    assert spread(trials, 0) == trials


@pytest.mark.parametrize("limit", [3, 4, 5, 6])
def test_a_limit_cuts_each_file_of_a_save_and_not_always_at_its_first_byte(limit):
    chosen = spread(writes.in_writes("crash", -signal.SIGXFSZ), limit)
    places = [one.detail.split(", byte ") for one in chosen]
    assert {file for file, _ in places} == {"state.safetensors", "progress.json", "manifest.json"}
    assert len({byte for _, byte in places}) > 1


def test_the_report_says_of_how_many_trials_those_of_a_limit_are():
    what = "crash before each change of the file system"
    planned = [one for one in trials_of("writes", KILLS) if one.what == what]
    done = {"what": what, "detail": "", "ok": True, "figure": 0, "note": "", "count": 1}
    found = DATES | {"command": "python"}
    some = report({"writes": found | {"trials": [done] * 3}})
    assert re.search(rf"\| {what} +\| 3 of {len(planned)} +\| 3 ", some)
    whole = report({"writes": found | {"trials": [done] * len(planned)}})
    assert re.search(rf"\| {what} +\| {len(planned)} +\| {len(planned)} ", whole)


def test_the_report_counts_kills_and_not_the_trials_that_have_several():
    what = "kill -9 of all processes at random, ddp"
    done = {"what": what, "detail": "", "ok": True, "figure": 0, "note": "", "count": 5}
    found = DATES | {"command": "python", "trials": [done] * 2}
    assert re.search(rf"\| {what} +\| 10 of 50 +\| 10 ", report({"random kills": found}))


@pytest.mark.parametrize("step", [1, 9])
def test_the_row_of_a_step_is_in_no_other_step(step):
    row = row_of_step(step) - 1
    first, second = (list(shuffled(210, (42, epoch)).at(np.arange(210))) for epoch in (0, 1))
    assert first.index(row) // 12 == step - 1 and second.index(row) >= 24 and row > 20


# ---- What they compare ----


def finished_run(folder, loss=1.0, weight=1.0, speed=7.0, name="weight"):
    """A folder as a run leaves it."""
    folder.mkdir()
    line = {"step": 1, "loss": loss, "tokens_per_second": speed, "peak_memory_gib": speed}
    line["elapsed_seconds"] = speed
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    save_file({name: np.array([weight])}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({}, 0),
        ({"speed": 8.0}, 0),
        ({"loss": 1.0 + 1e-15}, 1),
        ({"weight": 1.0 + 1e-15}, 1),
        ({"name": "other"}, 2),
        ({"loss": 2.0, "weight": 2.0}, 2),
    ],
)
def test_runs_are_equal_bit_for_bit_except_for_speed_time_and_memory(change, differences, tmp_path):
    whole = finished_run(tmp_path / "whole")
    assert unequal(finished_run(tmp_path / "run", **change), whole) == differences


def test_runs_that_have_left_nothing_are_not_equal(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    assert unequal(tmp_path / "a", tmp_path / "b") == 2


def test_a_line_of_metrics_that_is_cut_is_no_step(tmp_path):
    assert last_step(tmp_path) == 0
    whole = '{"step": 1, "loss": 2}\n{"step": 2, "loss": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(f'{whole}{{"step": 3, "lo')
    assert last_step(tmp_path) == 2


def test_the_last_line_is_the_recipes_own():
    output = (
        "step 7\nrun the command again\n\nW1123 torchrun\nTraceback (most\n  File\nshard report:"
    )
    assert last_line(output) == "run the command again"


# ---- How they are run ----


class FakeLab:
    def __init__(self, folder):
        self.folder = folder


def test_a_trial_as_promised_leaves_no_folder(tmp_path, capsys):
    kept = attempt(FakeLab(tmp_path), "resume", 3, trial(result=Result(True, 0, "a note", 5)))
    assert kept == {
        "what": "stopped",
        "detail": "step 1",
        "ok": True,
        "figure": 0,
        "note": "",
        "count": 5,
    }
    assert not (tmp_path / "resume" / "3").exists()
    printed = capsys.readouterr().out
    assert (
        printed
        == "    ok  resume: stopped, step 1 (0 s, differences from an uninterrupted run: 0)\n"
    )


def test_a_trial_that_fails_keeps_its_folder_and_tells_no_path_of_this_machine(tmp_path, capsys):
    result = failed(f"no {tmp_path}/resume/3/metrics.jsonl", figure=2)
    kept = attempt(FakeLab(tmp_path), "resume", 3, trial(result=result))
    assert kept["note"] == "no RUNS/resume/3/metrics.jsonl" and not kept["ok"]
    assert (tmp_path / "resume" / "3").is_dir() and "FAILED" in capsys.readouterr().out


def test_an_exception_is_a_trial_that_fails(tmp_path):
    def raise_error(lab, folder):
        raise FileNotFoundError("status.json")

    kept = attempt(FakeLab(tmp_path), "resume", 0, Trial("stopped", "", raise_error))
    assert not kept["ok"] and kept["note"] == "FileNotFoundError: status.json"


def test_trials_that_were_not_done_again_keep_their_results():
    before = {
        "command": "first",
        "trials": [{"what": "a", "detail": detail} for detail in ("kept", "again", "dropped")],
    }
    planned = [trial("a", "kept"), trial("a", "again")]
    done = [{"what": "a", "detail": "again", "new": True}]
    facts = DATES | {"command": "second"}
    found = with_earlier(facts, done, before, planned)
    assert found["trials"] == [{"what": "a", "detail": "kept"}, *done]
    assert found["command"] == "first`, then `second"
    assert with_earlier(facts, done, {}, planned) == facts | {"trials": done}


def test_a_launch_that_does_not_end_is_killed_and_has_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr("proof.trials.lab.TIMEOUT", 0.2)
    environment = {"TRIAL": str(tmp_path), "PATH": "/usr/bin:/bin"}
    launch = Launch([shutil.which("sh"), "-c", "echo begun; sleep 60"], environment, tmp_path)
    launch.wait_for_file(tmp_path)
    ended = launch.end()
    assert ended.code is None and ended.output == "begun\n" and ended.seconds < 30


def test_a_launch_that_ends_has_its_code_and_output(tmp_path):
    environment = {"TRIAL": str(tmp_path), "PATH": "/usr/bin:/bin"}
    launch = Launch(
        [shutil.which("sh"), "-c", "echo out; echo err >&2; exit 75"], environment, tmp_path
    )
    ended = launch.end()
    assert ended.code == 75 and ended.output == "out\nerr\n"


def test_a_group_that_was_not_possible_is_told_so():
    found = DATES | {"command": "python", "trials": []}
    assert "skipped: not possible on this machine" in report({"disk": found})
    assert isinstance(GROUPS["disk"], Group)


def test_a_pattern_that_is_no_regular_expression_is_a_usage_error():
    words = [sys.executable, REPO / "scripts" / "fault_injection.py", "--list", "--only", "("]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 64
    assert done.stderr.startswith("fault_injection.py: --only (: missing )")
