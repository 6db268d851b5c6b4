# SPDX-License-Identifier: Apache-2.0
"""Hooks of meshes (core/extras.py): the layout, and what would be silently wrong under it."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from core.engine import read_on_every_rank, zero_stage
from core.model import read_config
from core.workarounds import fsdp_plugin
from extras.mesh import workarounds
from extras.mesh.attention import keep_rows_apart
from extras.mesh.layout import MeshLayout

# The modules that accelerate/big_modeling.py, _attach_context_parallel_hooks, has ignore their mask
HOOKED = "self_attn"
WITHOUT = {
    "tp": "use fsdp2_full_shard.yaml",
    "cp": "use fsdp2_full_shard.yaml",
    "sp": "use deepspeed_zero3.yaml",
}


def layout(args: Any, accelerator: Accelerator) -> MeshLayout | None:
    """Return the layout of a mesh of the kinds in the recipe's MESH, or None without a mesh."""
    config = accelerator.parallelism_config
    sizes = {kind: getattr(config, f"{kind}_size", 1) for kind in args.MESH}
    if all(size == 1 for size in sizes.values()):
        return None
    found = MeshLayout(accelerator, sizes)
    if found.tp > 1 and fsdp_plugin(accelerator) is not None:
        workarounds.leave_whole_weights_to_fsdp(accelerator)
        read_on_every_rank(accelerator)  # its own part of the weights
    if found.sp > 1:
        workarounds.let_batches_differ_in_size()
        keep_rows_apart()
    return found


# ---- What would be silently wrong ----
def find_faults(args: Any, layout: Any) -> Iterator[str]:
    """Yield a problem for each thing under which ranks of a mesh would compute something else."""
    if not isinstance(layout, MeshLayout):
        return
    yield from find_faults_of_engine(layout)
    if layout.parts_of_row() > 1:
        yield from find_faults_of_parts(args, layout)
        yield from find_faults_of_model(args, layout)


def find_faults_of_engine(layout: MeshLayout) -> Iterator[str]:
    """Yield a problem for each kind of group that the engine does not form, or not exactly."""
    stage = zero_stage(layout.accelerator)
    plugin = fsdp_plugin(layout.accelerator)
    if layout.tp > 1 and (stage is not None or (plugin and plugin.fsdp_version == 1)):
        yield f"{layout.strategy} does not split matrices: use tp.yaml or fsdp2_tp.yaml"
    if layout.tp > 1 and layout.cp > 1:
        yield "tp_size and cp_size together were never compared with one process: set one to 1"
    if layout.sp > 1 and stage in (None, 0):
        yield f"{layout.strategy} does not split rows: use deepspeed_ulysses.yaml"


def find_faults_of_parts(args: Any, layout: MeshLayout) -> Iterator[str]:
    """Yield a problem for each argument and key that cannot work on a part of a row.

    In a ring no mask but the causal one is known (accelerate/big_modeling.py,
    _attach_context_parallel_hooks).
    """
    kind = "cp" if layout.cp > 1 else "sp"
    config: Any = layout.accelerator.parallelism_config
    takes = getattr(config.sp_handler, "sp_attn_implementation", None) or "sdpa"
    if args.attn_implementation not in (None, "sdpa") or takes != "sdpa":
        yield (
            f"{kind}_size {layout.sizes[kind]}: only sdpa exchanges the parts of a row: leave out "
            "--attn_implementation and parallelism_config_sp_attn_implementation"
        )
    if getattr(args, "neftune_noise_alpha", None) is not None:
        yield (
            "--neftune_noise_alpha: the noise depends on the length of a row, of which a rank has "
            "a part: leave it out"
        )
    if layout.cp > 1 and getattr(args, "predict_with_generate", False):
        yield (
            "--predict_with_generate pads prompts on the left, which needs a mask, and context "
            "parallelism has none: leave it out, and use generate.py on the result"
        )
    zero = getattr(layout.accelerator.state.deepspeed_plugin, "deepspeed_config", {})
    if zero.get("zero_optimization", {}).get("reduce_scatter") is False:
        # deepspeed/runtime/zero/stage3.py divides by ranks / sp then.
        yield (
            "reduce_scatter: false has DeepSpeed divide gradients by another number under sequence "
            "parallelism: leave it out"
        )


def find_faults_of_model(args: Any, layout: MeshLayout) -> Iterator[str]:
    """Yield a problem if the model's attention would see only a rank's own part of a row.

    Nothing is known of classes that transformers does not have.
    """
    config = read_config(args)
    for reason in find_attention_of_its_own(config.get_text_config(), layout):
        kind = "cp" if layout.cp > 1 else "sp"
        yield f"{kind}_size {layout.sizes[kind]}: {reason}: {WITHOUT[kind]}"


def find_attention_of_its_own(config: Any, layout: MeshLayout) -> Iterator[str]:
    """Yield why ranks that share rows cannot take the place of a model's attention.

    Args:
        config: of a causal language model of transformers.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None:
        if not (model_class._supports_attention_backend and model_class._supports_sdpa):
            yield f"a {config.model_type} model does not attend by transformers' sdpa"
            return
        if layout.cp > 1:
            with torch.device("meta"):  # without weights
                model = model_class(config)
            if not any(path.endswith(HOOKED) for path, _ in model.named_modules()):
                yield f"a {config.model_type} model has no {HOOKED}, whose masks a ring drops"
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None):
        kinds = ["sliding window"]
    others = sorted(set(kinds or ()) - {"full_attention"})
    if others:  # deepspeed/runtime/sequence_parallel/ulysses_sp.py, uattn_wrapper, drops masks too
        yield f"only full attention is exact, and this model has {', '.join(others)}"
