# SPDX-License-Identifier: Apache-2.0
"""Without the hub, what only the hub can have is refused after one request."""

import pytest
from datasets import config
from huggingface_hub import constants

from generation import hub, loading
from hub_ids import find_missing


@pytest.fixture
def out_of_reach(monkeypatch, tmp_path):
    """The number of requests to a hub that nobody answers, without a cache."""
    requests = []

    class Session:
        def head(self, url, timeout):
            requests.append(timeout)
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "get_session", Session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return requests


def refused(capsys, function, *arguments):
    with pytest.raises(SystemExit, match="69"):
        function(*arguments)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_model_of_the_hub_is_refused_after_one_request(out_of_reach, capsys):
    line = refused(capsys, loading.find_source, "owner/model")
    assert line.startswith("error: owner/model: no such folder, and https://")
    assert line.endswith("cannot be reached: Name or service not known")
    assert out_of_reach == [hub.TIMEOUT]


def test_a_hub_that_answers_is_left_to_the_libraries(out_of_reach, monkeypatch):
    class Session:
        def head(self, url, timeout):
            return 404

    monkeypatch.setattr(hub, "get_session", Session)
    assert hub.why_not_from_hub("owner/name") is None


def test_a_path_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("gpt2", "owner/model", "mine", "mine/model"):
        assert find_missing(name) is None
    for name in ("runs/run", "./run", "/none/run", "~/none/run", "a/b/run", "mine/modle"):
        assert "no such folder" in find_missing(name)
    (tmp_path / "cache" / "models--mine--modle" / "snapshots").mkdir(parents=True)
    assert find_missing("mine/modle") is None  # the hub gave it before
