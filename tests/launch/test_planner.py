# SPDX-License-Identifier: Apache-2.0
"""What the planner counts at rest is the live tensors' bytes, and measured peaks are planned."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import llama
import planner_jobs
from core.engine import Layout
from core.model import make_adamw
from fakes import fake_accelerator
from planner.engines import Profiles, at_rest
from planner.plan import Batch, Plan
from planner.trace import profile_of

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


# They have each thing that a job can have. evidence/test_planner.py holds all of them, when it
# measures them again.
JOBS = ("plain", "checkpointed", "accumulation", "LoRA head bf16", "packed")


def test_peaks_that_were_measured_on_cpu_ranks_are_planned_within_the_bound_of_each_engine(
    tmp_path,
):
    AutoConfig.for_model("llama", **planner_jobs.MODEL).save_pretrained(tmp_path)
    profiles = Profiles()  # which jobs and engines share
    measured = [row for row in planner_jobs.tracked_rows() if row["job"] in JOBS]
    rows = [planner_jobs.compare(row, tmp_path, profiles) for row in measured]
    assert len(rows) >= 90
    far = [row for row in rows if abs(row["error"]) > planner_jobs.bound_of(row)]
    assert not far


def live_bytes(tensors):
    """Bytes of the distinct storages behind tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values())


def scales_of(model):
    """The scales of float8, and bitsandbytes' states, also those that all layers could share."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is not None:
            yield state.absmax
            yield state.code
            if state.nested:
                yield state.state2.absmax
                yield state.state2.code
        if getattr(weight, "SCB", None) is not None:
            yield weight.SCB
        if hasattr(module, "row_scale"):
            yield module.row_scale


SHARED = ("step", "qmap1", "qmap2")  # a number, and tables of 1 KiB that all weights share
WHOLE = ["--modules_to_save", "lm_head", "embed_tokens", "norm"]
DOUBLE = ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant", "--dtype", "bfloat16"]
KINDS = {
    "full": ["--dtype", "float32"],
    "full, 8-bit AdamW": ["--optim", "adamw_8bit"],
    "LoRA, 8-bit AdamW": ["--optim", "adamw_8bit", "--use_peft", "--lora_r", "64"],
    "int8": ["--use_peft", "--load_in_8bit"],
    "float8": ["--use_peft", "--load_in_fp8", "--dtype", "bfloat16"],
    "fp4": ["--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "fp4"],
    "LoRA, whole modules": ["--use_peft", *WHOLE],
    "nf4, double, whole modules": [*DOUBLE, *WHOLE],
}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_states_are_the_live_tensors_bytes(flags, tmp_path):
    # A head of its own beside adapters, which never train it
    shape = {"tie_word_embeddings": "--use_peft" not in flags}
    config = AutoConfig.for_model("llama", **SMALL, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = planner_jobs.training_arguments(tmp_path, flags)
    plan = Plan(args)
    planned = at_rest(plan, profile_of(plan, Batch(1, 16, 16))).device
    model = llama.load_model(args, Layout(fake_accelerator()))
    states = states_after_a_step(model, make_adamw(model, args))
    assert planned["parameters"] == live_bytes(model.parameters())
    assert planned["optimizer"] == live_bytes(states)
    assert planned["quantization"] == live_bytes(scales_of(model))


def states_after_a_step(model, optimizer):
    """The tensors of an optimizer's state, apart from those that all weights share."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name not in SHARED
    ]
