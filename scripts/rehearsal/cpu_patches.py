# SPDX-License-Identifier: Apache-2.0
"""What makes accelerate, torch and deepspeed treat gloo CPU ranks as they treat GPUs.

Apart from the hooks that measure, this is the only place in scripts/ that changes accelerate, torch
or deepspeed for a recipe. Every change is one function below, whose docstring says what upstream
does. Seen in accelerate 1.15, torch 2.13 and deepspeed 0.19.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, _init_utils
from torch.distributed.tensor import DTensor, Shard

# Settings of the YAML that accelerate's plugin refuses if there is no GPU
LOADS_ONCE = "FSDP_CPU_RAM_EFFICIENT_LOADING"
SYNCS_STATES = "FSDP_SYNC_MODULE_STATES"


def treat_cpu_as_gpu(ranks_per_node: int) -> None:
    """Make every change that this rank's engine needs; the launcher's environment names it."""
    use_gloo()
    do_not_pin_memory()
    sum_norms_in_double()
    # Over which FSDP1 HYBRID_SHARD shards; upstream it is always 1: nothing would be sharded
    torch.cpu.device_count = lambda: ranks_per_node
    if int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")) > 1:
        attend_by_a_ring()
    if os.environ.get("FSDP_VERSION", "1") == "1":
        sync_fsdp1_states()
    if uses("DEEPSPEED"):
        do_not_compile()


def uses(engine: str) -> bool:
    """Return whether the launcher has chosen an engine: FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{engine}") == "true"


def use_gloo() -> None:
    """Let accelerate see a distributed job on CPU.

    Upstream `PartialState._prepare_backend` looks for a device, finds none and returns no backend:
    every rank believes that it is the only one. Upstream's CPU mode (MULTI_CPU) never becomes FSDP
    or DeepSpeed. These two are therefore announced as MULTI_GPU, from which accelerate switches to
    them; plain DDP is MULTI_CPU, as upstream has it.
    """
    original = PartialState._prepare_backend

    def prepare_backend(
        self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None
    ) -> tuple:
        if "LOCAL_RANK" not in os.environ:  # single.yaml: not a distributed job
            return original(self, cpu, sagemaker_dp, backend)
        if any(map(uses, ("FSDP", "DEEPSPEED", "PARALLELISM_CONFIG"))):
            return "gloo", DistributedType.MULTI_GPU
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend


def do_not_pin_memory() -> None:
    """Let FSDP2 offload to memory that is not pinned.

    Upstream's `CPUOffloadPolicy()` pins memory, which needs a device.
    """
    original = FullyShardedDataParallelPlugin.set_cpu_offload

    def set_cpu_offload(self: FullyShardedDataParallelPlugin) -> None:
        original(self)
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload


def sum_norms_in_double() -> None:
    """Let the norm of gradients in fp32 be as exact as on a GPU.

    Upstream adds up the squares of a tensor on the CPU in a few fp32 sums, one element after the
    other: the norm of a whole matrix is low by up to 1e-5, that of its shards by less. A GPU adds
    up many short sums. DeepSpeed takes norms in double on both.
    """
    norm_of_one = torch.linalg.vector_norm

    def vector_norm(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype", tensor.dtype) != torch.float32:
            return norm_of_one(tensor, *args, **kwargs)
        in_double = kwargs | {"dtype": torch.float64}
        return norm_of_one(tensor, *args, **in_double).float()

    def foreach_norm(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return [vector_norm(tensor, *args, **kwargs) for tensor in tensors]

    torch.linalg.vector_norm = vector_norm
    torch._foreach_norm = foreach_norm


def sync_fsdp1_states() -> None:
    """Let FSDP1 ranks get their weights from rank 0 over gloo, as they do on GPUs.

    Upstream accelerate's plugin refuses fsdp_cpu_ram_efficient_loading if there is no GPU, and
    torch's `_check_module_states_for_sync_module_states` refuses to synchronize, although gloo can
    broadcast CPU tensors. The rehearsal would not load the model as production does.
    """
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None
    original = FullyShardedDataParallelPlugin.__post_init__

    def put_on_cpu(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    def post_init(self: FullyShardedDataParallelPlugin) -> None:
        requested = {}
        for name in (LOADS_ONCE, SYNCS_STATES):
            requested[name] = os.environ.pop(name, "false")
        original(self)
        os.environ.update(requested)
        loads_once = requested[LOADS_ONCE].lower() == "true"
        self.cpu_ram_efficient_loading = loads_once
        self.sync_module_states = loads_once or requested[SYNCS_STATES].lower() == "true"
        self.param_init_fn = put_on_cpu

    FullyShardedDataParallelPlugin.__post_init__ = post_init


def do_not_compile() -> None:
    """Let DeepSpeed use gloo's collectives and torch's AdamW.

    Upstream compiles a shared-memory op for CPU ranks and, with offload, DeepSpeedCPUAdam. That
    takes minutes and a compiler, and leaves a lock file if a rank is stopped meanwhile, which
    blocks every later run. A rehearsal's ZeRO-3 also splits weights that upstream keeps whole,
    unless a probe measures what is compared with a plan of the YAML.
    """
    # Imported by name, since the attribute deepspeed.comm.torch is torch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    original = DeepSpeedPlugin.__post_init__

    def post_init(self: DeepSpeedPlugin) -> None:
        original(self)
        self.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        if "REHEARSAL_PROBE" not in os.environ:
            self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    DeepSpeedPlugin.__post_init__ = post_init


def attend_by_a_ring() -> None:
    """Let context parallelism use torch's attention for CPUs.

    Upstream's ring attention knows only the kernels of CUDA (torch/distributed/tensor/
    experimental/_context_parallel/_attention.py). Its own templates for forward and backward pass
    take any kernel that returns the sums by which pieces of attention are joined; that for CPUs
    does.
    """
    attention: Any = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    operations = torch.ops.aten
    forward = operations._scaled_dot_product_flash_attention_for_cpu.default
    backward = operations._scaled_dot_product_flash_attention_for_cpu_backward.default

    def ring_forward(operation: Any, args: tuple, options: dict) -> tuple:
        mesh = args[0].device_mesh
        settings = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | options
        outputs = attention._templated_ring_attention(
            mesh.get_group(), 2, forward, *map(DTensor.to_local, args[:3]), **settings
        )
        return tuple(split_by_tokens(output, mesh) for output in outputs)

    def ring_backward(operation: Any, args: tuple, options: dict) -> tuple:
        mesh = args[0].device_mesh
        gradient, *others = map(DTensor.to_local, args[:6])
        settings = {"dropout_p": args[6], "is_causal": args[7]} | options
        outputs = attention._templated_ring_attention_backward(
            mesh.get_group(), 2, backward, gradient, "grad_out", *others, **settings
        )
        return tuple(split_by_tokens(output, mesh) for output in outputs[:3])

    attention.custom_ops[forward] = ring_forward
    attention.custom_ops[backward] = ring_backward


def split_by_tokens(part: torch.Tensor, mesh: Any) -> DTensor:
    """Return the parts of all ranks as a tensor of the ring, [rows, heads, tokens, ...]."""
    return DTensor.from_local(part.contiguous(), mesh, [Shard(2)], run_check=False)
