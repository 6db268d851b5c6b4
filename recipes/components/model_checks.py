# SPDX-License-Identifier: Apache-2.0
"""Check whether a loaded model can be trained on the rows, as requested, under the strategy."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from components import varlen
from components.adapter_layers import OF_OTHER_INPUTS, find_unfit_layers, reads_no_text
from components.loading import read_model_config
from components.model_folder import why_not_causal
from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    ExpertAdapterArguments,
    LigerArguments,
    LossInHeadArguments,
)
from core.batches import takes_one_line
from core.engine import is_sharded, name_of_engine, zero_stage
from core.exits import Exit, fail
from core.state import running_statistics
from core.summary import size_of
from core.workarounds import fsdp_plugin

# What LoRA takes in peft; bitsandbytes' quantized layers are linear layers too
TAKE_ADAPTERS = (
    torch.nn.Linear,
    Conv1D,
    torch.nn.Embedding,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.MultiheadAttention,
)
# Last names of tables of positions: nn.Embedding, also of fixed sines, and buffers (GPT-J, CodeGen,
# CTRL). Rotary positions have no table.
TABLES_OF_POSITIONS = {
    "wpe",
    "position_embeddings",
    "embed_positions",
    "positions_embed",
    "pos_encoding",
}
# Layers that attend by a mask, in which rows of one line can be kept apart
MASKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Found in the source of a model that makes its masks from the positions. OPT and Falcon take
# positions too, but make their masks without them.
MASKS_BY_POSITION = re.compile(
    r'mask\w*\([^)]*position_ids=position_ids|"position_ids": position_ids'
)


# ---- Files ----
def refuse_quantized_base(
    args: CommonArguments, accelerator: Accelerator, has_new_head: bool
) -> None:
    """End with 64 if the files hold quantized weights that would not be read as such.

    Only those of bitsandbytes can be trained on, under the flags that say how they are stored. A
    new head beside them would be quantized too.
    """
    config = read_model_config(args)
    if config is None:
        return  # Loading the model says what is wrong.
    stored = getattr(config, "quantization_config", None)
    stored = stored or getattr(config.get_text_config(), "quantization_config", None)
    if not stored:
        return
    method = stored.get("quant_method", "bitsandbytes")
    fix = "use the unquantized model"
    if method == "bitsandbytes" and isinstance(args, DenseModelArguments) and not has_new_head:
        options: Any = BitsAndBytesConfig.from_dict(stored)
        names = ["load_in_8bit", "load_in_4bit"]
        if options.load_in_4bit:
            names += ["bnb_4bit_quant_type", "bnb_4bit_use_double_quant"]
        others = [name for name in names if getattr(args, name) != getattr(options, name)]
        stored_as = str(options.bnb_4bit_quant_storage).removeprefix("torch.")
        if others:
            flags = " ".join(f"--{name} {getattr(options, name)}" for name in others)
            fix = f"pass {flags}, or {fix}"
        elif options.load_in_4bit and fsdp_plugin(accelerator) and stored_as != args.dtype:
            fix = f"FSDP cannot shard {stored_as}: {fix}, or ddp.yaml"
        else:
            return
    name = f"--model_name_or_path {args.model_name_or_path}"
    fail(Exit.USAGE, f"{name}: its weights are quantized ({method}): {fix}")


def check_weights_are_read(
    args: CommonArguments,
    model: PreTrainedModel,
    report: Mapping[str, Any],
    has_new_head: bool = False,
) -> None:
    """End with 64 if weights of a model are random, since its files do not hold them.

    Args:
        report: that of from_pretrained.
        has_new_head: whether those of the head, and of a pooler, may be new.
    """
    shapes = {name: (stored, made) for name, stored, made in report["mismatched_keys"]}
    names = sorted({*report["missing_keys"], *shapes})
    if has_new_head:
        names = [name for name in names if is_of_body(name, model) and ".pooler." not in name]
    if not names:
        return
    listed = ", ".join(names[:3])
    problem = f"its files lack {len(names)} of its weights, such as {listed}: use a whole model"
    if names[0] in shapes:
        says = f"the shape {[*shapes[names[0]][0]]}, config.json says {[*shapes[names[0]][1]]}"
        problem = f"the weights of {names[0]} have {says}"
    fail(Exit.USAGE, f"--model_name_or_path {args.model_name_or_path}: {problem}")


def is_of_body(name: str, model: PreTrainedModel) -> bool:
    """Return whether a weight of a classifier belongs to the model below its head."""
    if model.base_model is model:  # CLIP's and a few others, whose head comes last
        return not name.startswith(f"{list(model._modules)[-1]}.")
    return name.startswith(f"{model.base_model_prefix}.")


# ---- Rows and arguments ----
def check_model(
    args: CommonArguments,
    model: torch.nn.Module,
    largest_token: int,
    longest_row: int = 0,
    *,
    shares_lines: bool = False,
    gives_ends: bool = False,
) -> None:
    """End with 64 if the model cannot be trained on such rows or with such arguments.

    Args:
        model: with or without adapters.
        largest_token: the largest token of the rows, the pad token included.
        longest_row: the number of tokens of the longest row.
        shares_lines: whether several rows, or documents of a stream, share a line of a batch and
            must not see each other.
        gives_ends: whether the attention is given the ends or lengths of the rows of a line,
            in place of a mask.
    """
    base = base_model_of(model)
    problems = [
        *find_encoder(args, base),
        *find_missing_embeddings(base, largest_token, longest_row),
        *find_unquantized_experts(args, model, base),
        *find_missing_parameters(args, model, base),
    ]
    if args.attn_implementation == varlen.NAME and varlen.problem_of(base):
        problems.append(
            f"--attn_implementation {varlen.NAME} does not work for {type(base).__name__}, since "
            f"{varlen.problem_of(base)}: use sdpa"
        )
    elif shares_lines:
        problems += find_mixed_rows(args, base, gives_ends)
    problems += find_missing_kernels(args, model, base)
    if problems:
        fail(Exit.USAGE, *problems)


def base_model_of(model: Any) -> PreTrainedModel:
    """Return the model that peft has wrapped, or the model itself if it has no adapters."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def find_encoder(args: CommonArguments, base: PreTrainedModel) -> Iterator[str]:
    """Yield a problem if a causal language model is wanted and its tokens would see later ones."""
    if isinstance(args, LossInHeadArguments):
        reason = why_not_causal(base.config.to_dict())
        if reason:
            yield f"--model_name_or_path {args.model_name_or_path}: {reason}"


def find_missing_embeddings(
    base: PreTrainedModel, largest_token: int, longest_row: int
) -> Iterator[str]:
    """Yield a problem if a token, or the last position of the longest row, has no embedding."""
    embeddings: Any = base.get_input_embeddings()
    if largest_token >= embeddings.num_embeddings:
        yield (
            f"the rows have a token {largest_token}, but the model has no embedding for it: "
            "resize its embeddings first"
        )
    places = min(places_in_tables(base), default=longest_row)
    if longest_row > places:
        yield (
            f"the longest row has {longest_row} tokens, but the model has positions for "
            f"{places}: use --max_length {places}"
        )


def places_in_tables(base: PreTrainedModel) -> Iterator[int]:
    """Yield how many positions of text each table in a model holds."""
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Embedding) and is_table_of_positions(name):
            yield places_of(module)
    for name, buffer in base.named_buffers():
        if is_table_of_positions(name) and buffer.dim() == 2:
            yield len(buffer)


def is_table_of_positions(path: str) -> bool:
    """Return whether a module or buffer has the name of a table of positions of text."""
    # peft moves a layer with an adapter, or one that is trained whole, into a part of its own
    name = path.removesuffix(".base_layer").removesuffix(".original_module").rpartition(".")[2]
    return name in TABLES_OF_POSITIONS and not OF_OTHER_INPUTS.search(path)


def places_of(table: torch.nn.Embedding) -> int:
    """Return how many positions a table holds.

    RoBERTa's begin after the one of padding, OPT's and BART's after an offset.
    """
    first = getattr(table, "offset", 0)
    if table.padding_idx is not None:
        first = table.padding_idx + 1
    return table.num_embeddings - first


def warn_of_long_rows(model: torch.nn.Module, longest_row: int) -> str:
    """Return a warning if rows are longer than the model was made for, or "".

    Such rows can be computed: `find_missing_embeddings` finds those that cannot.

    Args:
        model: with or without adapters.
        longest_row: the number of tokens of the longest row.
    """
    config = base_model_of(model).config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions < longest_row:
        return ""
    return (
        f"rows of {longest_row:,} tokens are longer than the {positions:,} positions that the "
        f"model was made for: pass --max_length {positions}, or expect it to be worse beyond them"
    )


def find_unquantized_experts(
    args: CommonArguments, model: torch.nn.Module, base: PreTrainedModel
) -> Iterator[str]:
    """Yield a problem if only a small part of the model would be quantized."""
    if not isinstance(args, DenseModelArguments):
        return
    if not args.load_in_8bit and not args.load_in_4bit:
        return
    share = share_of_experts(model)
    if share > 0.5:
        yield (
            f"bitsandbytes quantizes linear layers only, and {share:.0%} of "
            f"{type(base).__name__} are experts, which it skips: leave out --load_in_8bit and "
            "--load_in_4bit; --dtype bfloat16 halves a frozen base, full_shard and ZeRO-3 split it"
        )


def find_missing_parameters(
    args: CommonArguments, model: torch.nn.Module, base: PreTrainedModel
) -> Iterator[str]:
    """Yield a problem for each name in --lora_target_parameters that no parameter has."""
    if not isinstance(args, ExpertAdapterArguments) or not args.use_peft:
        return
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for ending in args.lora_target_parameters:
        if not any(name.endswith(f".{ending}") for name in names):
            yield (
                f"--lora_target_parameters {ending}: no parameter of {type(base).__name__} has a "
                "name that ends with it"
            )


def find_mixed_rows(
    args: CommonArguments, base: PreTrainedModel, gives_ends: bool
) -> Iterator[str]:
    """Yield a problem if rows that share a line would see each other."""
    reason = why_rows_would_mix(base, gives_ends)
    if not reason:
        return
    packing = [name for name in ("packing", "padding_free") if getattr(args, name, False)]
    if takes_one_line(args.attn_implementation):
        cure = "use --attn_implementation sdpa, or take another model"
    elif packing:
        cure = f"leave out --{packing[0]}, or take another model"
    else:
        cure = "take another model"
    yield f"{type(base).__name__} cannot keep the rows of a line apart ({reason}): {cure}"


def why_rows_would_mix(base: PreTrainedModel, gives_ends: bool) -> str:
    """Return why rows that share a line would see each other, or "" if they would not.

    Rows mix where masks are made without positions, and in layers that carry a state along.
    """
    layer_types = getattr(base.config.get_text_config(), "layer_types", None) or []
    others = set(layer_types) - MASKED_LAYER_TYPES
    if others:
        return ", ".join(sorted(others))
    source = inspect.getsource(sys.modules[type(base.base_model).__module__])
    if not MASKS_BY_POSITION.search(source):
        return "its masks do not depend on position_ids"
    calls = varlen.attention_calls(base)
    passes_ends = bool(calls) and all("**kwargs" in call for call in calls)
    if gives_ends and not passes_ends:
        return "its layers do not pass the ends of rows to their attention"
    return ""


def find_missing_kernels(
    args: CommonArguments, model: torch.nn.Module, base: PreTrainedModel
) -> Iterator[str]:
    """Yield a problem if Liger replaced nothing in the model."""
    if not isinstance(args, LigerArguments) or not args.use_liger_kernel:
        return
    for module in model.modules():
        if "liger" in f"{type(module).__module__} {module.forward.__module__}":
            return
    yield f"--use_liger_kernel: Liger has no kernels for {type(base).__name__}: leave it out"


# ---- Adapters ----
def check_adapters(model: torch.nn.Module, names: Sequence[str]) -> None:
    """End with 64 if a name in --lora_target_modules fits no layer, or one that takes no adapter.

    peft refuses the former only if no name fits, and the latter with a traceback.

    Args:
        names: names of layers, or ends of their paths, or ["all-linear"].
    """
    if names == ["all-linear"]:
        return
    linear = set()
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            linear.add(path.rpartition(".")[2])
    unfit = find_unfit_layers(model)
    for name in names:
        problem = find_adapter_problem(model, name, linear)
        for path, reason in unfit.items():
            if f".{path}".endswith(f".{name}"):
                problem = f"{path} cannot have an adapter: {reason}"
        if problem:
            fail(Exit.USAGE, f"--lora_target_modules {name}: {problem}")


def check_modules_to_save(model: Any, names: Sequence[str]) -> None:
    """End with 64 if a name in --modules_to_save fits no module, or one that cannot be trained.

    Args:
        model: of transformers, before adapters are added.
        names: names of modules, or ends of their paths.
    """
    for problem in find_problems_of_whole_modules(model, names):
        fail(Exit.USAGE, problem)


def find_problems_of_whole_modules(model: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each name in --modules_to_save, as `check_modules_to_save` takes them.

    Nothing here depends on weights, so that scripts/plan_memory.py can call it too.
    """
    ends = {path.rpartition(".")[2] for path, _ in model.named_modules() if path}
    for name in names:
        problem = find_problem_of_whole_module(model, name, ends)
        if problem:
            yield f"--modules_to_save {name}: {problem}"


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether bitsandbytes quantized a weight.

    One in 4 bits may be stored as floating-point numbers, several weights in each.
    """
    return hasattr(weight, "quant_state") or not weight.is_floating_point()


def find_problem_of_whole_module(model: Any, name: str, ends: set[str]) -> str:
    """Return why the modules with a name cannot be trained whole, or "".

    Args:
        ends: the last parts of the paths of the model's modules.
    """
    found = {
        path: layer for path, layer in model.named_modules() if f".{path}".endswith(f".{name}")
    }
    if not found:
        close = difflib.get_close_matches(name, sorted(ends), 1)
        meaning = f": did you mean {close[0]}?" if close else ""
        return f"no module of {type(model).__name__} has this name{meaning}"
    for path in found:
        if reads_no_text(model, path):
            return f"{path} reads no text, so that nothing would train it: leave it out"
    weights = [weight for module in found.values() for weight in module.parameters()]
    if not weights:
        return "it has no weights"
    if any(is_quantized(weight) for weight in weights):
        return "it is quantized, and only its adapters can be trained: leave it out"
    if not model.all_tied_weights_keys:  # Some models have no embeddings to ask for.
        return ""
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    if None not in tied and tied[0].weight is tied[1].weight:
        if any(weight is tied[0].weight for weight in weights):
            return (
                "the embeddings and the output head of this model share their weight, and only a "
                "copy of one of them would be trained: leave it out, or train all weights"
            )
    return ""


def find_adapter_problem(model: torch.nn.Module, name: str, linear: set[str]) -> str:
    """Return why the layers with a name cannot get adapters, or "".

    Args:
        linear: the names of the model's linear layers.
    """
    layers = f"Its linear layers are {', '.join(sorted(linear))}"
    found = {
        path: layer for path, layer in model.named_modules() if f".{path}".endswith(f".{name}")
    }
    if not found:
        close = difflib.get_close_matches(name, linear, 1)
        meaning = f"did you mean {close[0]}? " if close else ""
        return f"no layer of {type(model).__name__} has this name: {meaning}{layers}"
    if all(reads_no_text(model, path) for path in found):
        return f"{next(iter(found))} reads no text, so that nothing would train it: leave it out"
    for module in found.values():
        if not isinstance(module, TAKE_ADAPTERS):
            return (
                f"this is a {type(module).__name__} of {type(model).__name__}, which takes no "
                f"adapter: {layers}"
            )
    return ""


# ---- Strategy ----
def check_under_strategy(
    accelerator: Accelerator, args: CommonArguments, model: torch.nn.Module
) -> None:
    """End with 64 if the strategy in force cannot train this model."""
    check_running_statistics(accelerator, model)
    check_output_head(accelerator, args, model)
    recomputes = args.gradient_checkpointing and not args.use_peft
    if recomputes and any(running_statistics(model)):
        cause = "the running statistics of BatchNorm layers would move twice in each step"
        fail(Exit.USAGE, f"--gradient_checkpointing: {cause}: leave it out")


def check_running_statistics(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """End with 64 if the ranks' running statistics would differ, since only rank 0's are saved."""
    if is_sharded(accelerator) and any(running_statistics(model)):
        base = base_model_of(model)
        fail(
            Exit.USAGE,
            f"{type(base).__name__} has BatchNorm layers, whose running statistics "
            f"{name_of_engine(accelerator)} does not keep equal on all ranks: use ddp.yaml",
        )


def check_output_head(
    accelerator: Accelerator, args: CommonArguments, model: torch.nn.Module
) -> None:
    """End with 64 if the ranks would wait for each other in the output head.

    ZeRO-3 and FSDP1 gather adapters of the head whenever it multiplies, which is once per piece of
    the loss, and each rank has as many pieces as its tokens need.
    """
    if not isinstance(args, LossInHeadArguments):
        return
    plugin = fsdp_plugin(accelerator)
    is_fsdp1 = plugin is not None and plugin.fsdp_version == 1
    gathers_in_head = is_fsdp1 or zero_stage(accelerator) == 3
    if args.use_peft and gathers_in_head and head_has_adapters(model):
        fail(
            Exit.USAGE,
            f"{name_of_engine(accelerator)} cannot gather adapters of the output head piece by "
            "piece: leave it out of --lora_target_modules, or use ddp.yaml or an fsdp2 YAML",
        )


def head_has_adapters(model: Any) -> bool:
    """Return whether the output head is among the layers that got adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(model.get_output_embeddings(), BaseTunerLayer)


# ---- Sizes ----
def share_of_experts(model: torch.nn.Module) -> float:
    """Return the share of a model's elements that are experts.

    The experts of a layer are one tensor of three dimensions.
    """
    experts = total = 0
    for weight in model.parameters():
        size = size_of(weight)
        total += size
        if len(getattr(weight, "ds_shape", weight.shape)) == 3:
            experts += size
    return experts / total
