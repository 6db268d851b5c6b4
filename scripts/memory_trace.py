"""Trace one optimizer step of the real model under FakeTensorMode: tensors have shapes and lifetimes, but no bytes.

torch's own trackers (`MemTracker`, `FSDPMemTracker`) see every tensor that modules, autograd, FSDP2 and the optimizer
make and drop, on any number of ranks: the process group is torch's fake one. Model, optimizer and loss are the
recipe's own functions; sharding is what accelerate's `fsdp2_prepare_model` does. Not traced, since their engines read
the addresses of tensors, which fake ones do not have: FSDP1 and DeepSpeed; nor bitsandbytes' kernels, for which
`model_shapes.Quantized` stands in.
"""

import contextlib
import logging
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

import llama
from model_shapes import Unplannable, build, first_line, quiet

TOTAL = "Total"
CATEGORIES = {  # of the trackers: ours
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Other": "activations",
    "Sharded Param": "parameters",
    "Sharded Grad": "gradients",
    "OptState": "optimizer",
    "Unsharded Param": "unsharded",
    "Unsharded Grad": "unsharded",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
}


class PeakOnly:
    """A tracker that looks at the whole at each op, not at every module besides, of which LoRA makes thousands."""

    def _update_peak_stats(self, _):
        for device, held in self._curr_mem_snap.items():
            if held[TOTAL] > self._peak_mem.get(device, 0):
                self._peak_mem[device], self._peak_mem_snap[device] = held[TOTAL], dict(held)


class WholeTracker(PeakOnly, MemTracker):
    """torch's tracker of models that are not sharded."""


class ShardTracker(PeakOnly, FSDPMemTracker):
    """torch's tracker puts hooks of its own on each module of a unit, so that one of several modules, as accelerate
    makes of final norm and head, would be gathered and reduced once for each. Such a unit keeps torch's hooks here."""

    def _instrument_fsdp_module(self):
        root, members = self._root_mod, {}
        for module in root.modules():
            if isinstance(module, FSDPModule):
                members.setdefault(module._get_fsdp_state(), []).append(module)
        alone = [modules[0] for modules in members.values() if len(modules) == 1]
        self._root_mod = SimpleNamespace(modules=lambda: alone, buffers=root.buffers)
        super()._instrument_fsdp_module()
        self._root_mod = root
        for state, modules in members.items():
            if len(modules) > 1 and state._fsdp_param_group:
                self._name_tensors_of(state._fsdp_param_group)

    def _name_tensors_of(self, group):
        """Count whole parameters and sharded gradients of a unit as what they are."""
        self._instrument_fsdp_sharded_params_grads(group)
        wait, reduce = group.wait_for_unshard, group.post_backward

        def wait_for_unshard():
            wait()
            for param in group.fsdp_params:
                self._update_and_maybe_create_winfos(
                    param.unsharded_param, _FSDPRefType.UNSHARDED_PARAM
                )

        def post_backward(*unused):
            reduce(*unused)
            self._instrument_fsdp_sharded_params_grads(group)

        group.wait_for_unshard, group.post_backward = wait_for_unshard, post_backward


def make_fake(model):
    """Give a model on the meta device fake tensors on the CPU, tied ones once. Call it under FakeTensorMode."""
    made = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = torch.nn.Parameter(
                        torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad
                    )
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def shard(model, plan, mesh):
    """Shard the model as accelerate does under FSDP2, over the mesh; return it."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.mixed_precision)
    policy = MixedPrecisionPolicy()
    if low:  # as reduce_in_fp32 of the recipes
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.reshards,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )
    plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False) if plan.offloads else None
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision=plan.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


@contextlib.contextmanager
def fake_ranks(plan):
    """The mesh of plan.ranks ranks, in groups of plan.shards, that exist by name only; None where nothing is
    sharded."""
    if plan.engine != "fsdp2":
        yield None
        return
    replicas = plan.ranks // plan.shards
    names = ("dp_replicate", "dp_shard") if replicas > 1 else ("dp_shard",)
    dist.init_process_group("fake", rank=0, world_size=plan.ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (replicas, plan.shards)[-len(names) :], mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def told_of_packing(packed):
    """transformers reads from position_ids whether lines hold several rows; a fake tensor has no values to read."""
    import transformers.masking_utils as masking

    found = (
        (lambda position_ids: torch.zeros_like(position_ids))
        if packed
        else (lambda position_ids: None)
    )
    return mock.patch.object(masking, "find_packed_sequence_indices", found)


def batch_of(batch):
    """What the recipe's `collate` gives for it: lines of one row, or of two if they are packed."""
    inputs = {"input_ids": torch.zeros(batch.lines, batch.tokens, dtype=torch.long)}
    if batch.packed:
        inputs["position_ids"] = (torch.arange(batch.tokens) % -(-batch.tokens // 2)).repeat(
            batch.lines, 1
        )
    supervised = {
        name: torch.zeros(batch.learnt, dtype=torch.long) for name in ("positions", "targets")
    }
    return {"inputs": inputs, "supervised": supervised}


def micro_steps(model, optimizer, plan, make_batch, watch=lambda: None):
    """One optimizer step of the recipe: its loss, its clipping, its optimizer. `watch` is called once a micro-batch
    is there."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.autocasts)
    for _ in range(plan.args.gradient_accumulation_steps):
        batch = make_batch()
        watch()
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = llama.summed_loss(model, batch)
        loss.backward()
        del loss, batch
        llama.SUPERVISED.clear()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=not plan.keeps_gradients)


def prepared(model, plan, mesh):
    """The model as the recipe hands it to `prepare` and gets it back, and its optimizer."""
    if plan.args.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
    llama.loss_in_head(model, llama.logits_mib(plan.args, torch.device("cpu")))
    if plan.args.use_peft:  # FSDP2 does not autocast, but its trace does
        accelerator = SimpleNamespace(native_amp=plan.autocasts is not None, is_fsdp2=False)
        llama.leave_casts_to_autocast(model, plan.args, accelerator)
    if plan.casts:
        model.to(getattr(torch, plan.casts))
    if mesh:
        model = shard(model, plan, mesh)
    args = (
        plan.args
        if plan.args.optim.startswith("adamw_torch")
        else SimpleNamespace(**vars(plan.args) | {"optim": "adamw_torch"})
    )
    return model, llama.make_optimizer(model, args)


def peak_of(tracker):
    """{category: bytes} at the peak, of all devices that the tracker saw."""
    found = {}
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for name, size in snapshot.items():
            key = getattr(name, "value", name)
            if key != TOTAL and size:
                found[CATEGORIES[key]] = found.get(CATEGORIES[key], 0) + size
    return found


def tracked(model, optimizer, plan, make_batch):
    """Bytes at the peak of the second step: the first makes what stays, optimizer state and the trackers' own
    caches."""
    micro_steps(model, optimizer, plan, make_batch)
    batch = make_batch()
    if plan.engine == "fsdp2":
        tracker = ShardTracker(model, optimizer)
    else:
        tracker = WholeTracker()
        tracker.track_external(model, optimizer)
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        tracker._param_to_grad_hook_handles.update(
            {weight: (mock.Mock(), mock.Mock()) for weight in frozen}
        )  # it would hook them
    with tracker:
        micro_steps(model, optimizer, plan, lambda: batch, tracker.reset_mod_stats)
    return peak_of(tracker)


def measure(plan, config, batch):
    """As `simulate`, of one process, with real tensors on the CPU: what the planner is held against."""
    torch.manual_seed(0)
    model = build(plan.args, config, "cpu")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model, optimizer = prepared(model, plan, None)
        return tracked(model, optimizer, plan, lambda: batch_of(batch))


def simulate(plan, config, batch):
    """Return {category: bytes} at the peak of a rank's device, traced. Raises Unplannable for what cannot be
    traced."""
    if plan.engine not in ("single", "ddp", "fsdp2"):
        raise Unplannable(
            f"--simulate: {plan.name} reads addresses, which fake tensors do not have: leave it out"
        )
    if plan.offloads_parameters:
        raise Unplannable(
            "--simulate: fake tensors are on one device, so that offload moves nothing: leave it out"
        )
    if plan.args.optim.endswith("bit"):
        raise Unplannable(
            f"--simulate: no fake tensors for bitsandbytes' {plan.args.optim}: leave it out"
        )
    if batch.packed and plan.args.attn_implementation not in ("eager", "sdpa"):
        raise Unplannable(
            f"--simulate: traces sdpa, not {plan.args.attn_implementation}: leave it out"
        )
    torch.set_num_threads(1)
    model = build(plan.args, config)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # it reports what it raises
    with (
        warnings.catch_warnings(),
        quiet(),
        fake_ranks(plan) as mesh,
        FakeTensorMode(),
        told_of_packing(batch.packed),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        warnings.simplefilter("ignore")
        try:
            model, optimizer = prepared(make_fake(model), plan, mesh)
            return tracked(model, optimizer, plan, lambda: batch_of(batch))
        except Exception as error:  # what a model's own kernels make of fake tensors on a CPU
            raise Unplannable(
                f"--simulate: this model cannot be traced: {first_line(error)}"
            ) from None
