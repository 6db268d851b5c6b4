# SPDX-License-Identifier: Apache-2.0
"""Find what does not fit a mesh, before the model is loaded.

What is refused here would not give the loss of one process, or would end in a traceback after the
model was loaded.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from components.mesh import Mesh
from components.plugins import deepspeed_config
from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    ExpertAdapterArguments,
    InstructionTuningArguments,
    PipelineArguments,
    PredictionArguments,
)
from core.batches import takes_one_line
from core.workarounds import fsdp_plugin

if TYPE_CHECKING:
    from accelerate import Accelerator

    from components.strategy import Strategy

NOT_TOGETHER = "tensor and context parallelism together were never compared with one process"
# The modules that accelerate/big_modeling.py, _attach_context_parallel_hooks, has ignore their mask
HOOKED = "self_attn"
NAMES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def find_mesh_misfits(
    args: CommonArguments, accelerator: "Accelerator", strategy: "Strategy"
) -> Iterator[str]:
    """Yield a problem, with its fix, for each argument and key of the YAML that a mesh forbids."""
    mesh = Mesh.of(accelerator)
    if mesh.copies == 1:
        return
    places = mesh.data_ranks * mesh.copies
    if places != accelerator.num_processes:  # accelerate checks it for all engines but DeepSpeed
        yield (
            f"the sizes in parallelism_config multiply to {places}, and "
            f"{accelerator.num_processes} processes run: launch {places}, or change the sizes"
        )
    for kind, name in NAMES.items():
        if getattr(mesh, kind) > 1 and kind not in args.MESH:
            yield f"this recipe has no {name} parallelism: {instead_of(kind, args, mesh)}"
    if mesh.tp > 1 and mesh.cp > 1:
        yield f"{NOT_TOGETHER}: {without('cp', mesh)}"
    if mesh.tp > 1:
        yield from find_misfits_of_tp(args, accelerator, strategy)
    if mesh.cp > 1:
        yield from find_misfits_of_cp(args)
    if mesh.sp > 1:
        yield from find_misfits_of_sp(args, accelerator, strategy)
    if mesh.parts_of_row() > 1:
        yield from find_misfits_of_parts(args)


def instead_of(kind: str, args: CommonArguments, mesh: Mesh) -> str:
    """Return what to do without a dimension of the mesh that a recipe does not have."""
    if isinstance(args, PipelineArguments):
        return "use pp.yaml"
    return without(kind, mesh)


def without(kind: str, mesh: Mesh) -> str:
    """Return what to do to have the same ranks without the groups of a kind: "tp", "cp" or "sp".

    The ranks of such groups become shards of FSDP2. Without FSDP there are no shards beside a
    group, and DeepSpeed shards over all ranks without a mesh.
    """
    if kind == "sp":
        return "leave out parallelism_config, or use deepspeed_zero3.yaml"
    change = f"set {kind}_size to 1"
    if mesh.data_ranks * mesh.cp > 1:
        change += f" and dp_shard_size to {mesh.dp_shard * getattr(mesh, kind)}"
    return f"{change}, or use fsdp2_full_shard.yaml"


# ---- Arguments and keys of the YAML ----
def find_misfits_of_tp(
    args: CommonArguments, accelerator: "Accelerator", strategy: "Strategy"
) -> Iterator[str]:
    """Yield a problem for each argument and key that tensor parallelism forbids."""
    plugin = fsdp_plugin(accelerator)
    if strategy.zero_stage is not None or strategy.fsdp_version == 1:
        yield f"{strategy.name} does not split matrices: use tp.yaml, or fsdp2_tp.yaml with FSDP2"
    elif plugin is not None and plugin.cpu_ram_efficient_loading:
        # accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict
        yield (
            f"{strategy.name}: each rank reads its own part of the weights, and FSDP would "
            "broadcast those of rank 0: set fsdp_cpu_ram_efficient_loading: false"
        )
    if isinstance(args, DenseModelArguments) and (args.load_in_8bit or args.load_in_4bit):
        yield (
            "a quantized base cannot be split by matrices: leave out --load_in_8bit and "
            "--load_in_4bit, or use ddp.yaml"
        )
    if isinstance(args, DenseModelArguments) and args.torch_compile:
        yield "--torch_compile does not work on split matrices: leave it out"
    if args.optim.endswith("bit") and not strategy.is_sharded:
        yield f"--optim {args.optim} cannot hold parts of matrices: use adamw_torch_fused"
    if args.use_peft:
        yield from find_adapters_that_cannot_be_split(args)


def find_adapters_that_cannot_be_split(args: CommonArguments) -> Iterator[str]:
    """Yield a problem for each kind of adapter that cannot follow the split of a matrix."""
    if isinstance(args, DenseModelArguments) and args.use_dora:
        yield (
            "--use_dora takes norms over whole matrices, which tensor parallelism splits: leave "
            "it out, or use fsdp2_full_shard.yaml"
        )
    if isinstance(args, ExpertAdapterArguments) and args.lora_target_parameters:
        yield (
            "--lora_target_parameters: adapters of experts cannot follow the split of their "
            "matrices: pass it without a value, or use fsdp2_full_shard.yaml"
        )


def find_misfits_of_cp(args: CommonArguments) -> Iterator[str]:
    """Yield a problem for each argument that context parallelism forbids.

    Its ring knows no mask but the causal one (accelerate/big_modeling.py,
    _attach_context_parallel_hooks).
    """
    if args.attn_implementation not in (None, "sdpa"):
        yield (
            f"--attn_implementation {args.attn_implementation}: the ring of context parallelism "
            "replaces only sdpa: use sdpa"
        )
    for name in ("packing", "padding_free"):
        if getattr(args, name, False):
            yield (
                f"--{name}: rows of one line would see each other in the ring: leave it out, or "
                "use deepspeed_ulysses.yaml"
            )
    if isinstance(args, PredictionArguments) and args.predict_with_generate:
        yield (
            "--predict_with_generate pads prompts on the left, which needs a mask, and context "
            "parallelism has none: leave it out, and use generate.py on the result"
        )


def find_misfits_of_sp(
    args: CommonArguments, accelerator: "Accelerator", strategy: "Strategy"
) -> Iterator[str]:
    """Yield a problem for each argument and key that DeepSpeed-Ulysses forbids."""
    if strategy.zero_stage in (None, 0):
        yield f"{strategy.name} has no sequence parallelism: use deepspeed_ulysses.yaml"
        return
    config: Any = accelerator.parallelism_config
    handler = config.sp_handler
    takes = handler.sp_attn_implementation or "sdpa"
    chosen = args.attn_implementation or "sdpa"
    if chosen != takes:
        # `find_misfits_of_parts` refuses all others that accelerate takes
        fixes = []
        if takes != "sdpa":
            fixes.append("set parallelism_config_sp_attn_implementation: sdpa")
        if chosen != "sdpa":
            fixes.append("leave --attn_implementation out")
        yield (
            f"sequence parallelism replaces {takes}, and with {chosen} ranks would attend only to "
            f"their own part of a row: {' and '.join(fixes)}"
        )
    if not handler.sp_seq_length_is_variable:
        yield (
            "rows differ in length: set parallelism_config_sp_seq_length_is_variable: true, and "
            "leave out parallelism_config_sp_seq_length"
        )
    zero = deepspeed_config(accelerator).get("zero_optimization", {})
    if strategy.zero_stage == 3 and zero.get("reduce_scatter") is False:
        # deepspeed/runtime/zero/stage3.py divides by ranks / sp then.
        yield (
            "reduce_scatter: false has DeepSpeed divide gradients by another number under sequence "
            "parallelism: leave it out"
        )


def find_misfits_of_parts(args: CommonArguments) -> Iterator[str]:
    """Yield a problem for each argument that cannot work on a part of a row."""
    if takes_one_line(args.attn_implementation):
        yield (
            f"--attn_implementation {args.attn_implementation} takes all rows of a batch in one "
            "line, of which a rank would have a part: use sdpa"
        )
    if isinstance(args, InstructionTuningArguments) and args.neftune_noise_alpha is not None:
        yield (
            "--neftune_noise_alpha: the noise depends on the length of a row, of which a rank has "
            "a part: leave it out"
        )
    if isinstance(args, DenseModelArguments) and args.torch_compile:
        yield "--torch_compile does not work on parts of rows: leave it out"


# ---- Model ----
def find_model_misfits(args: CommonArguments, mesh: Mesh) -> Iterator[str]:
    """Yield a problem for each size of the model that the mesh cannot split."""
    if mesh.copies == 1:
        return
    config = read_model_config(args)
    if config is not None:
        yield from find_misfits_of_config(config.get_text_config(), mesh)


def read_model_config(args: CommonArguments) -> Any:
    """Return the config of the model in transformers' form, or None if it cannot be read.

    Loading the model then says what is wrong.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, trust_remote_code=False
        )
    except Exception:  # Each kind of config raises exceptions of its own.
        return None


def find_misfits_of_config(config: Any, mesh: Mesh) -> Iterator[str]:
    """Yield a problem for each size in a config of transformers that the mesh cannot split."""
    if mesh.tp > 1 and not config.base_model_tp_plan:
        yield (
            f"transformers has no plan by which to split the matrices of a {config.model_type} "
            f"model: {without('tp', mesh)}"
        )
        return
    for kind in ("tp", "sp"):
        yield from find_indivisible_sizes(config, kind, mesh)
    sharing = "sp" if mesh.sp > 1 else "cp"
    if getattr(mesh, sharing) == 1:
        return
    if not attends_by_sdpa(config):
        yield (
            f"a {config.model_type} model does not attend by transformers' sdpa, in whose place "
            f"ranks that share rows exchange their parts: {without(sharing, mesh)}"
        )
        return
    if mesh.cp > 1 and not has_attention_of_this_name(config, HOOKED):
        yield (
            f"context parallelism drops masks in modules of the name {HOOKED}, and a "
            f"{config.model_type} model has none, so that its ring would be given a mask: "
            f"{without('cp', mesh)}"
        )
        return
    others = attention_other_than_full(config)
    if mesh.sp > 1 and not has_separate_heads(config):
        yield (
            f"sequence parallelism exchanges whole heads, which a {config.model_type} model does "
            f"not name: {without('sp', mesh)}"
        )
    if mesh.cp > 1 and others:
        yield (
            "the ring of context parallelism knows only full attention, and this model has "
            f"{', '.join(others)}: {without('cp', mesh)}"
        )
    if mesh.sp > 1 and others:
        # deepspeed/runtime/sequence_parallel/ulysses_sp.py, uattn_wrapper
        yield (
            f"sequence parallelism drops the masks by which sdpa knows {', '.join(others)}: "
            f"{without('sp', mesh)}"
        )


def find_indivisible_sizes(config: Any, kind: str, mesh: Mesh) -> Iterator[str]:
    """Yield a problem for each number of heads, and for TP each width, that a size does not divide.

    Args:
        kind: "tp" or "sp", both of which give a rank whole heads.
    """
    size = getattr(mesh, kind)
    names = ["num_attention_heads", "num_key_value_heads"]
    if kind == "tp":
        names += ["intermediate_size", "vocab_size"]
    for name in names:
        number = getattr(config, name, None) or size
        if number % size:
            smaller = largest_common_size(config, names, size)
            yield (
                f"{kind}_size {size} does not divide the model's {name}, {number}: "
                f"{with_smaller(kind, smaller, mesh)}"
            )


def with_smaller(kind: str, size: int, mesh: Mesh) -> str:
    """Return what to set to have groups of a smaller size, 1 for none, of "tp" or "sp"."""
    if size == 1:
        return without(kind, mesh)
    change = f"set {kind}_size to {size}"
    shards, rest = divmod(mesh.dp_shard * getattr(mesh, kind), size)
    has_shards = kind == "sp" or mesh.data_ranks * mesh.cp > 1
    if has_shards and not rest:
        return f"{change} and dp_shard_size to {shards}"
    places = mesh.data_ranks * mesh.copies // getattr(mesh, kind) * size
    return f"{change} and launch {places} processes"


def largest_common_size(config: Any, names: list[str], size: int) -> int:
    """Return the largest number below `size` that divides each of these sizes of a config."""
    numbers = [getattr(config, name, None) or size for name in names]
    for smaller in range(size - 1, 1, -1):
        if all(number % smaller == 0 for number in numbers):
            return smaller
    return 1


def attends_by_sdpa(config: Any) -> bool:
    """Return whether all attention of a causal language model is transformers' sdpa.

    Models that compute it themselves, with biases for example, would see only the tokens of their
    own rank, without an error. Of classes that transformers does not have, nothing is known.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return True
    return model_class._supports_attention_backend and model_class._supports_sdpa


def has_attention_of_this_name(config: Any, name: str) -> bool:
    """Return whether a causal language model of transformers has a module of this name.

    Of classes that transformers does not have, nothing is known.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return True
    with torch.device("meta"):  # without weights
        model = model_class(config)
    return any(path.endswith(name) for path, _ in model.named_modules())


def has_separate_heads(config: Any) -> bool:
    """Return whether queries, keys and values have the heads that DeepSpeed-Ulysses exchanges.

    It reads the number of key-value heads from the config, and takes all heads to be of one size,
    unlike those of latent attention (DeepSeek's MLA).
    """
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    return getattr(config, "num_key_value_heads", None) is not None and not is_latent


def attention_other_than_full(config: Any) -> list[str]:
    """Return the kinds of attention in a model that are not full, as accelerate reads them."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return ["a sliding window"] if getattr(config, "sliding_window", None) else []
    return sorted(set(layer_types) - {"full_attention"})
