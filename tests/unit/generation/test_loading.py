# SPDX-License-Identifier: Apache-2.0
"""What a folder holds: a whole model, or adapters and their base."""

from argparse import Namespace
from functools import partial

import pytest

from generation import loading
from launching import edit_json


def test_the_base_of_adapters_is_loaded_in_the_revision_that_they_were_trained_on(
    tmp_path, monkeypatch
):
    config = {"base_model_name_or_path": "owner/model", "revision": "v2"}
    edit_json(tmp_path / "adapter_config.json", **config)
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
