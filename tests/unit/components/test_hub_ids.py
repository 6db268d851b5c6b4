# SPDX-License-Identifier: Apache-2.0
"""A folder that is not there is told at once, and not looked for on the hub."""

from argparse import Namespace

import pytest

from components import hub_ids
from components.data_files import Source, load_rows
from components.exits import Exit
from components.hub_ids import find_missing
from generation.continuing import run
from generation.loading import find_source
from planner.errors import UnplannableError
from planner.shapes import read_model_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the folder mine/model, and a cache of the hub beside it."""
    (tmp_path / "here" / "mine" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(hub_ids.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "mine", "mine/model"])
def test_what_is_here_or_may_be_on_the_hub_is_not_missing(name, here):
    assert find_missing(name) is None


@pytest.mark.parametrize("name", ["runs/run", "./run", "/none/run", "~/none/run", "a/b/run"])
def test_a_path_is_not_asked_of_the_hub(name, here):
    problem = find_missing(name)
    assert problem is not None and problem.endswith("run: no such folder")


def test_a_tilde_that_the_shell_left_is_told_with_the_folder_that_it_means(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "here"))
    problem = find_missing("~/mine/model")
    assert problem is not None and problem.endswith(f"write {here / 'here' / 'mine' / 'model'}")


def test_a_name_in_a_folder_that_is_here_is_not_asked_of_the_hub(here):
    problem = find_missing("mine/modle")
    assert problem is not None and problem.startswith("mine/modle: no such folder in mine/; ")
    problem = find_missing("mine/rows", "dataset")
    assert problem is not None and "mine/rows: no such file or folder in mine/; " in problem
    assert "hf download mine/rows --repo-type dataset --local-dir mine/rows" in problem


def test_what_the_hub_gave_before_may_be_meant_though_a_folder_has_the_name_of_its_owner(here):
    (here / "cache" / "models--mine--modle" / "snapshots").mkdir(parents=True)
    assert find_missing("mine/modle") is None
    assert find_missing("mine/modle", "dataset") is not None


@pytest.mark.parametrize("name", ["mine/modle", "runs/modle"])
def test_every_command_says_at_once_that_there_is_no_such_folder(name, here, capsys):
    """Where this asked the hub, it would end with 69."""
    with pytest.raises(SystemExit) as end:
        find_source(name)
    assert end.value.code == Exit.USAGE
    with pytest.raises(SystemExit) as end:
        run(Namespace(model_name_or_path=name, device="cpu"))
    assert end.value.code == Exit.USAGE
    with pytest.raises(UnplannableError, match=f"{name}: no such folder") as refused:
        read_model_config(name)
    assert refused.value.code == Exit.USAGE
    with pytest.raises(SystemExit) as end:
        load_rows(Source(name, None, "train", (), is_required=True))
    assert end.value.code == Exit.DATA
    told = capsys.readouterr().err
    assert told.count(f"{name}: no such folder") == 2
    assert f"{name}: no such file or folder" in told
