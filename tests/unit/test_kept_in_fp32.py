# SPDX-License-Identifier: Apache-2.0
"""What stays in fp32 under mixed precision: gradients, frequencies, embeddings' state."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel

from components.arguments import TrainingArguments
from components.optimizer import make_optimizer
from components.upstream import reduce_in_fp32
from fakes import fake_accelerator


def fsdp(version, precision):
    """An Accelerator with accelerate's own policy, after what the recipe does with it."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision(precision)
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)
    accelerator = fake_accelerator(
        distributed_type=DistributedType.FSDP, is_fsdp2=version == 2, state=state
    )
    reduce_in_fp32(accelerator)
    return plugin.mixed_precision_policy


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_reduces_gradients_in_fp32_and_computes_in_half_precision(version, precision):
    policy = fsdp(version, precision)
    assert policy.reduce_dtype == torch.float32
    assert policy.param_dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def test_fsdp2_does_not_round_the_loss():
    assert fsdp(2, "bf16").output_dtype is None


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_fsdp1_leaves_rotary_frequencies_as_they_are(one_rank):
    """accelerate's policy casts all buffers: frequencies would be off by up to 0.4 %."""

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("inv_freq", torch.tensor([0.1234567, 1.0]), persistent=False)

        def forward(self, x):
            return x * self.weight * self.inv_freq

    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(Rotary(), mixed_precision=fsdp(1, "bf16"), device_id=cpu)
    model(torch.ones(2))
    assert torch.equal(model.inv_freq, torch.tensor([0.1234567, 1.0]))


@pytest.mark.parametrize(
    ("stage", "offload", "adds_in"),
    [
        (0, "none", None),
        (1, "none", None),
        (2, "none", "fp32"),
        (2, "cpu", None),
        (3, "none", "fp32"),
        (3, "cpu", "fp32"),
        (2, None, "fp32"),
    ],
)
def test_deepspeed_reduces_in_fp32_and_adds_in_fp32_where_it_can(stage, offload, adds_in):
    config = {"zero_optimization": {"offload_optimizer": offload and {"device": offload}}}
    zero = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    reduce_in_fp32(fake_accelerator(state=SimpleNamespace(deepspeed_plugin=zero, fsdp_plugin=None)))
    assert config["communication_data_type"] == "fp32"
    assert config.get("data_types", {}).get("grad_accum_dtype") == adds_in


def test_a_deepspeed_config_may_say_otherwise():
    zero = SimpleNamespace(zero_stage=2, deepspeed_config={"communication_data_type": "bf16"})
    reduce_in_fp32(fake_accelerator(state=SimpleNamespace(deepspeed_plugin=zero, fsdp_plugin=None)))
    assert zero.deepspeed_config["communication_data_type"] == "bf16"


def test_embeddings_keep_32_bits_of_state_under_an_8_bit_optimizer():
    model = torch.nn.Sequential(torch.nn.Embedding(64, 128), torch.nn.Linear(128, 64))
    args = TrainingArguments(optim="adamw_8bit", learning_rate=1e-3, weight_decay=0.0)
    optimizer, _ = make_optimizer(model, args, fake_accelerator(), total_steps=1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["state1"].dtype == torch.float32
    assert optimizer.state[model[1].weight]["state1"].dtype == torch.uint8
