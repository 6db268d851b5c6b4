# SPDX-License-Identifier: Apache-2.0
"""What the libraries make of experts that are spread over ranks, without our workarounds.

The numbers of spread experts are in test_cells.py, stopped runs in test_chains.py.
"""

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import mixtral
from components import upstream
from components.cli import parse_arguments
from components.experts import modules_of_experts
from components.strategy import new_accelerator
from components.weights import load_pretrained
from fakes import mixture_of_two
from harm import shows_harm_without
from ranks import on_ranks

# Has accelerate take CPU ranks for GPUs also without an engine, and DDP for those of no device
AS_ON_GPUS = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a mixture of 2 experts."""
    config = mixture_of_two()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def spread(folder):
    """An Accelerator of two ranks that share experts, and the mixture as they load it."""
    args = parse_arguments(mixtral.Arguments, words=["--ep_size", "2", "--report_to", "none"])
    accelerator = new_accelerator(args)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return accelerator, load_pretrained(AutoModelForCausalLM, accelerator, folder, **options)


def error_of(function, *args):
    """The first words of the error that a function ends with, "" if it ends without."""
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@shows_harm_without("ddp_takes_split_weights")
def test_accelerate_refuses_split_weights_under_ddp(cured, folder):
    def prepare():
        accelerator, model = spread(folder)
        if cured:
            return error_of(accelerator.prepare_model, model)
        return error_of(Accelerator.prepare_model, accelerator, model)

    found = on_ranks(prepare, 2, **AS_ON_GPUS)
    assert all(error == "" if cured else "incompatible with DDP" in error for error in found)


@shows_harm_without("leave_experts_out_of_ddp")
def test_ddp_takes_the_experts_of_rank_0_for_those_of_all(cured, folder):
    def prepare():
        _, model = spread(folder)
        (experts,) = modules_of_experts(model)
        own = experts.down_proj.to_local().detach().clone()
        if cured:
            upstream.leave_experts_out_of_ddp(model)
        error = error_of(DistributedDataParallel, model)
        return error == "" and torch.equal(experts.down_proj.to_local(), own)

    assert all(on_ranks(prepare, 2)) == cured


@shows_harm_without("spreading_experts_over")
def test_transformers_shards_what_it_does_not_spread(cured, folder):
    def load():
        from transformers.distributed import DistributedConfig

        if cured:
            _, model = spread(folder)
        else:
            config = DistributedConfig(fsdp_size=2, ep_size=2)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        return hasattr(model.lm_head.weight, "device_mesh")

    assert on_ranks(load, 2) == [not cured] * 2
