# SPDX-License-Identifier: Apache-2.0
"""Adapters and copies of split layers start as one process's, and compute what it computes."""

from contextlib import nullcontext

import pytest
import torch
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import llama
from components import upstream
from components.cli import parse_arguments
from components.strategy import new_accelerator
from harm import shows_harm_without
from ranks import on_ranks

TP = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
WORDS = "--use_peft --lora_dropout 0.5 --modules_to_save lm_head embed_tokens --dtype float32"
# A share of a weight's largest gradient: parts are summed in another order, and fp32 rounds at 6e-8
CLOSE = 1e-5
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a model whose heads two ranks can share."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder)
    return folder


def whole(tensor):
    """A tensor on the host, with the parts of all ranks."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone().numpy()  # not a view, since training changes the weight


def trained(model):
    """What is trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def model_of(folder, words=WORDS):
    """The model with its adapters, as the recipe loads it on this rank."""
    args = parse_arguments(
        llama.Arguments, words=["--model_name_or_path", str(folder), *words.split()]
    )
    accelerator = new_accelerator(args)
    set_seed(0)
    return llama.load_model(args, accelerator)


def first_gradients(folder):
    """The weights at the start, and their gradients where no B is 0, on this rank."""
    model = model_of(folder).train()
    start = {name: whole(weight) for name, weight in trained(model).items()}
    for name, weight in trained(model).items():
        if "lora_B" in name:
            weight.data.fill_(0.1)
    torch.manual_seed(1)  # for dropout
    logits = model(input_ids=torch.arange(4, 44)[None], use_cache=False).logits
    logits.float().log_softmax(-1)[..., 5].sum().backward()
    gradients = {name: whole(weight.grad) for name, weight in trained(model).items()}
    return start, gradients


@pytest.fixture(scope="module")
def one_process(small):
    """The same in one process."""
    (found,) = on_ranks(lambda: first_gradients(small))
    return found


def test_ranks_start_with_the_adapters_of_one_process_and_get_its_gradients(small, one_process):
    """With dropout, which drops on each rank the part of what one process drops."""
    start, gradients = one_process
    for rank_start, rank_gradients in on_ranks(lambda: first_gradients(small), 2, **TP):
        assert rank_start.keys() == start.keys()
        for name, weight in start.items():
            assert (rank_start[name] == weight).all(), name
            error = abs(rank_gradients[name] - gradients[name]).max()
            assert error <= CLOSE * abs(gradients[name]).max(), name


def test_the_other_half_of_an_adapter_is_whole(small):
    def is_split():
        weights = trained(model_of(small))
        return {name: isinstance(weight, DTensor) for name, weight in weights.items()}

    for found in on_ranks(is_split, 2, **TP):
        for name, split in found.items():
            is_by_input = "o_proj" in name or "down_proj" in name
            if "lora_" in name:
                assert split == (("lora_A" in name) == is_by_input), name
            else:
                assert split, name


@shows_harm_without("making_whole_adapters")
def test_peft_makes_adapters_of_a_part_of_a_weight(small, one_process, cured):
    def widths():
        if not cured:
            upstream.making_whole_adapters = nullcontext
        model = model_of(small, "--use_peft --lora_target_modules o_proj --dtype float32")
        return {name: tuple(weight.shape) for name, weight in trained(model).items()}

    wanted = {name: weight.shape for name, weight in one_process[0].items() if "o_proj" in name}
    for found in on_ranks(widths, 2, **TP):
        assert (found == wanted) == cured


@shows_harm_without("copying_split_weights")
def test_torch_copies_no_split_weights(small, cured):
    def error():
        if not cured:
            upstream.copying_split_weights = nullcontext
        try:
            model_of(small)
        except RuntimeError as problem:
            return str(problem)
        return ""

    # The part of the first rank begins at address 0, which torch takes for a tensor without one.
    _, found = on_ranks(error, 2, **TP)
    assert (found == "") if cured else ("invalid python storage" in found)


@shows_harm_without("run_copy_by_itself")
def test_a_copy_of_a_split_layer_runs_the_original(small, cured):
    def has_gradient():
        if not cured:
            upstream.run_copy_by_itself = lambda *_: None
        model = model_of(small)
        model(input_ids=torch.arange(4, 12)[None], use_cache=False).logits.sum().backward()
        weights = trained(model)
        return weights["base_model.model.lm_head.modules_to_save.default.weight"].grad is not None

    assert on_ranks(has_gradient, 2, **TP) == [cured] * 2
