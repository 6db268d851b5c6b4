# SPDX-License-Identifier: Apache-2.0
"""The folder of `from_pretrained` is the one that a single process writes, whoever owns what.

Each rank is a fork. The models are tiny, and so is here what an owner has at least.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    MixtralConfig,
    NomicBertConfig,
)

from components import shards, upstream
from components.export import save_model
from components.strategy import ProbedAccelerator
from ranks import on_ranks

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
LAYERS = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ENGINES = {
    "DDP": {},
    "FSDP1": FSDP | LAYERS | {"FSDP_VERSION": 1, "FSDP_USE_ORIG_PARAMS": "true"},
    "FSDP2": FSDP | LAYERS | {"FSDP_VERSION": 2},
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
HEADS = {"num_key_value_heads": 2}
OF_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
MODELS = {
    "plain": (AutoModelForCausalLM, LlamaConfig(**SIZES, **HEADS)),
    "tied": (AutoModelForCausalLM, LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)),
    # A weight of the model is several tensors in the files
    "experts": (AutoModelForCausalLM, MixtralConfig(**SIZES, **HEADS, num_local_experts=4)),
    # Three weights of the model are one tensor in the files
    "joined": (AutoModelForMaskedLM, NomicBertConfig(**SIZES)),
    "buffers": (AutoModelForSeq2SeqLM, BartConfig(**OF_BART)),
}
PROCESSOR = SimpleNamespace(save_pretrained=lambda folder: None)


def weights_in(folder):
    """All tensors of a folder's files."""
    weights = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        weights |= load_file(file)
    return weights


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_write_the_tensors_that_one_process_writes(engine, tmp_path):
    loaded = tmp_path / "loaded"
    for name, (auto_class, config) in MODELS.items():
        set_seed(0)
        auto_class.from_config(config).save_pretrained(loaded / name)

    def save_all():
        shards.SMALLEST_SHARE = 1
        accelerator = ProbedAccelerator()
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        for name, (auto_class, _) in MODELS.items():
            model = auto_class.from_pretrained(loaded / name)
            upstream.leave_embeddings_to_accelerate(model)
            optimizer = torch.optim.SGD(model.parameters())
            # accelerate would look for the layers of the first model in the others
            accelerator.state.fsdp_plugin = copy.copy(plugin)
            model, _ = accelerator.prepare(model, optimizer)
            save_model(accelerator, model, PROCESSOR, str(tmp_path / "saved" / name))

    on_ranks(save_all, 2, **ENGINES[engine])
    for name, (auto_class, _) in MODELS.items():
        saved = tmp_path / "saved" / name
        expected = weights_in(loaded / name)
        found = weights_in(saved)
        assert len(list(saved.glob("model-0000?-of-00002.safetensors"))) == 2, name
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        _, info = auto_class.from_pretrained(saved, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], name
        for file in ("config.json", "generation_config.json"):
            if (loaded / name / file).exists():
                assert (saved / file).read_bytes() == (loaded / name / file).read_bytes(), name
