# SPDX-License-Identifier: Apache-2.0
"""What a folder holds: a whole model, or adapters and their base."""

import json
from argparse import Namespace
from functools import partial

import pytest

from generation import loading


@pytest.fixture
def folder(tmp_path):
    """A folder with the configuration of a model, but without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def write_adapters(folder, base):
    folder.mkdir()
    config = json.dumps({"base_model_name_or_path": base})
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").touch()


def test_adapters_name_their_base_which_lends_its_tokenizer(folder, tmp_path):
    adapters = tmp_path / "adapters"
    write_adapters(adapters, str(folder))
    source = loading.find_source(str(adapters))
    assert source.weights == source.tokenizer == str(folder)
    (adapters / "tokenizer_config.json").write_text("{}")
    assert source.tokenizer == str(adapters)


def test_the_base_of_adapters_is_loaded_in_the_revision_that_they_were_trained_on(
    tmp_path, monkeypatch
):
    config = {"base_model_name_or_path": "owner/model", "revision": "v2"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").touch()
    source = loading.find_source(str(tmp_path))
    loaded = []

    def load(name, **options):
        loaded.append((name, options["revision"]))
        raise OSError("no hub")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", load)
    args = Namespace(dtype="auto", device="cpu", load_in_4bit=False)
    for call in (source.template, partial(loading.load_model, source, args)):
        with pytest.raises(SystemExit):
            call()
    assert loaded == [("owner/model", "v2")] * 2


@pytest.mark.parametrize("name", ["run.json", "run_public.json"])
def test_adapters_are_not_loaded_on_other_weights_than_their_runs(name, folder, tmp_path, capsys):
    (folder / "model.safetensors").write_bytes(b"weights")
    adapters = tmp_path / "adapters"
    write_adapters(adapters, str(folder))
    loading.find_source(str(adapters))  # Nothing is known of the run.
    recorded = loading.fingerprint_of_weights(str(folder), "main")
    (adapters / name).write_text(json.dumps({"arguments": {}, "base_weights": recorded}))
    loading.find_source(str(adapters))
    (folder / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(SystemExit) as end:
        loading.find_source(str(adapters))
    said = capsys.readouterr().err
    assert end.value.code == 65 and len(said.splitlines()) == 1
    assert "not those that the adapters were trained on" in said and name in said
