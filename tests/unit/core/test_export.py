# SPDX-License-Identifier: Apache-2.0
"""The exported folder has each weight once, under the name that `from_pretrained` knows."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM

from core import workarounds
from core.export import save_model
from fakes import fake_accelerator, small_llama
from harm import shows_harm_without


class Processor:
    """A tokenizer, as far as it matters here."""

    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text("{}")


def save(model, folder):
    save_model(fake_accelerator(), model, Processor(), str(folder))


def with_adapters():
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(AutoModelForCausalLM.from_config(small_llama()), config)


def test_a_full_disk_leaves_the_adapters_that_are_there(tmp_path, monkeypatch):
    save(with_adapters(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Processor, "save_pretrained", refuse)
    with pytest.raises(SystemExit, match="73"):
        save(with_adapters(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_fsdp1(model):
    layer_class = type(model.get_base_model().model.layers[0])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({layer_class}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


@shows_harm_without("remove_fsdp1_wrappers")
def test_peft_finds_no_adapters_inside_of_fsdp1s_wrappers(one_rank, tmp_path, monkeypatch, cured):
    if not cured:
        monkeypatch.setattr(workarounds, "remove_fsdp1_wrappers", lambda model: None)
    save(in_fsdp1(with_adapters()), tmp_path / "wrapped")
    save(with_adapters(), tmp_path / "plain")
    name = "adapter_model.safetensors"
    exported = load_file(tmp_path / "wrapped" / name)
    assert (exported.keys() == load_file(tmp_path / "plain" / name).keys()) == cured
    if cured:
        found = (tmp_path / "wrapped" / name).read_bytes()
        assert found == (tmp_path / "plain" / name).read_bytes()
    else:
        assert not exported
