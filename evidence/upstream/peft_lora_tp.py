# SPDX-License-Identifier: Apache-2.0
"""peft: LoRA on a row-wise layer under tensor parallelism does not train (2 gloo ranks)."""

import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig


def adapt(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    mesh = DistributedConfig(tp_size=2)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=mesh)
    torch.manual_seed(0)  # the same seed on all ranks of a tensor-parallel group, as in Trainer
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"]))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj.lora_A.default")
    left, right = layer.weight.full_tensor().chunk(2, dim=1)
    halves, result = "equal" if left.equal(right) else "different", "a pass"
    try:
        model(torch.arange(16)[None])
    except RuntimeError as error:
        result = f"RuntimeError: {str(error).strip()}"
    if rank == 0:
        print(f"expected: different halves of lora_A\ngot: {halves} halves of lora_A")
        print(f"expected: a pass\ngot: {result}")


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    with tempfile.TemporaryDirectory() as path:
        config = LlamaConfig(hidden_size=64, num_hidden_layers=1)
        LlamaForCausalLM(config).save_pretrained(path)
        start_processes(adapt, (path,), nprocs=2, start_method="fork")
