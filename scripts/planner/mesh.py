# SPDX-License-Identifier: Apache-2.0
"""The mesh that is planned for, and which arguments and models cannot run on it."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from core.engine import Layout
from extras.experts.layout import ExpertLayout
from extras.mesh.hooks import find_attention_of_its_own
from extras.mesh.layout import MeshLayout

# Under which of these names transformers' configs have the number of experts in a layer
NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# A stand-in for an Accelerator that is not asked
NO_RANKS: Any = SimpleNamespace(num_processes=1, process_index=0)


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh: ranks that share the weights, the rows, a row, layers or experts."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def copies(self) -> int:
        """Ranks that have the same rows."""
        return self.cp * self.sp * self.tp

    @property
    def multiple_of(self) -> int:
        """The number of which the length of each line is a multiple."""
        return self.layout(NO_RANKS).multiple_of

    def describe(self, engine: str) -> str:
        """Return the name of a strategy with what the mesh adds to its engine, such as "TP 2"."""
        words = [engine] if engine else []
        for name in ("cp", "sp", "tp", "ep"):
            size = getattr(self, name)
            if size > 1:
                words.append(f"{name.upper()} {size}")
        return " x ".join(words)

    def layout(self, accelerator: Any) -> Layout:
        """Return the layout that a recipe would make with an Accelerator, or a stand-in for one."""
        if self.ep > 1:
            return ExpertLayout(accelerator, {"ep": self.ep})
        if self.copies > 1:
            return MeshLayout(accelerator, {"cp": self.cp, "sp": self.sp, "tp": self.tp})
        return Layout(accelerator)


def layout_of(accelerator: Any) -> Layout:
    """Return the layout of the stand-in for an Accelerator in fake_ranks.py."""
    config = accelerator.parallelism_config
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("cp", "sp", "tp")}
    return Mesh(**sizes, ep=accelerator.expert_ranks).layout(accelerator)


def misfits_of_arguments(args: Any, engine: str, mesh: Mesh) -> Iterator[str]:
    """Yield what ends in an error of the engine's own while a run starts.

    Args:
        args: of a recipe.
        engine: its name, such as "FSDP1 FULL_SHARD".
    """
    is_fsdp = engine.startswith("FSDP")
    is_sharded = is_fsdp or engine.startswith("DeepSpeed")
    is_quantized = args.load_in_8bit or args.load_in_4bit
    if args.load_in_8bit and is_fsdp:
        yield f"{engine} cannot shard int8 weights"
    if args.load_in_4bit and engine == "FSDP1 SHARD_GRAD_OP":
        yield f"{engine} cannot hold a 4-bit base"
    if args.use_peft and engine == "FSDP1 NO_SHARD":
        yield f"{engine} no longer lists frozen weights after the first step"
    if args.use_dora and engine.startswith("FSDP1"):
        yield f"{engine} gives DoRA flattened parts of weights"
    if args.optim.endswith("bit") and is_sharded:
        yield f"--optim {args.optim} cannot hold the shards of {engine}"
    if mesh.tp > 1 and (is_quantized or args.use_dora):
        yield (
            "tensor parallelism splits no base under --load_in_8bit or --load_in_4bit, and no "
            "adapters under --use_dora"
        )
    if mesh.cp > 1 and (args.packing or args.padding_free):
        yield "--packing, --padding_free: rows of one line would see each other in a ring"
    if mesh.ep > 1 and args.optim.endswith("bit"):
        yield f"--optim {args.optim} cannot hold parts of experts"


def misfits_of_model(config: Any, mesh: Mesh) -> list[str]:
    """Return why a mesh cannot split a model of transformers, by its config."""
    config = config.get_text_config()
    return [*misfits_of_sharing(config, mesh), *misfits_of_experts(config, mesh.ep)]


def misfits_of_sharing(config: Any, mesh: Mesh) -> Iterator[str]:
    """Yield why ranks cannot share the rows of a model."""
    if mesh.tp > 1 and not config.base_model_tp_plan:
        yield f"transformers has no plan by which to split a {config.model_type} model"
        return
    for kind in ("tp", "sp"):
        size = getattr(mesh, kind)
        names = ["num_attention_heads", "num_key_value_heads"]
        if kind == "tp":
            names += ["intermediate_size", "vocab_size"]
        for name in names:
            number = getattr(config, name, None) or size
            if number % size:
                yield f"{kind}_size {size} does not divide the model's {name}, {number}"
    if mesh.cp * mesh.sp > 1:
        layout: Any = mesh.layout(NO_RANKS)
        yield from find_attention_of_its_own(config, layout)


def misfits_of_experts(config: Any, size: int) -> Iterator[str]:
    """Yield why the experts of a model cannot be spread over groups of a size."""
    if size == 1:
        return
    experts = 0
    for name in NUMBER_OF_EXPERTS:
        experts = experts or getattr(config, name, None) or 0
    if not experts:
        yield f"--ep_size: a {config.model_type} model has no experts"
    elif experts % size:
        yield f"--ep_size {size} does not divide the model's {experts} experts"
