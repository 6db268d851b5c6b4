# SPDX-License-Identifier: Apache-2.0
"""What is evaluated: runs, and what they were trained from, asked with the same prompts."""

import json
import shutil

import pytest

from evaluation.contestants import find_contestants, hash_file, hash_weights
from generation.loading import Source


@pytest.fixture
def copy_run(adapters, tmp_path):
    """A function that copies the run with other arguments."""

    def copy(name, **arguments):
        folder = tmp_path / name
        shutil.copytree(adapters, folder)
        run = json.loads((folder / "run.json").read_text())
        run["arguments"] |= arguments
        (folder / "run.json").write_text(json.dumps(run))
        return str(folder)

    return copy


@pytest.fixture
def copy_full(base, tmp_path):
    """A function that makes the folder of a full run that began with a model."""

    def copy(name, begin):
        folder = tmp_path / name
        shutil.copytree(base / "model", folder)
        (folder / "run.json").write_text(json.dumps({"arguments": {"model_name_or_path": begin}}))
        return str(folder)

    return copy


def test_adapters_come_after_their_base(adapters, base):
    before, after = find_contestants([str(adapters)], with_base=True)
    assert before.name == before.source.name == str(base / "model")
    assert after.before == before.name and after.source.base == before.name
    assert before.source.base is None and before.before is None


def test_a_full_run_comes_after_the_model_that_it_began_with(copy_full, base):
    run = copy_full("run", str(base / "model"))
    before, after = find_contestants([run], with_base=True)
    assert (before.name, after.name, after.before) == (str(base / "model"), run, before.name)


def test_a_base_is_evaluated_again_for_a_run_with_other_prompts(adapters, copy_run):
    other = copy_run("other", chat_template_kwargs={"enable_thinking": False})
    found = find_contestants([str(adapters), other], with_base=True)
    assert len({one.name for one in found}) == 4
    assert found[2].settings == found[3].settings == {"enable_thinking": False}
    assert found[3].before == found[2].name and found[1].before == found[0].name


def test_a_base_that_was_moved_away_is_named(copy_full, refused, tmp_path):
    code, line = refused(find_contestants, [copy_full("run", str(tmp_path / "gone"))], True)
    assert code == 65 and str(tmp_path / "gone") in line and "run.json" in line


def test_hashes_are_of_the_weights_and_those_of_the_base(adapters, base):
    hashes = hash_weights(Source(str(adapters), str(base / "model")))
    weights = [adapters / "adapter_model.safetensors", base / "model" / "model.safetensors"]
    assert set(hashes) == {str(adapters / "run.json"), *map(str, weights)}
    assert all(hashes[str(path)] == hash_file(path) for path in weights)
