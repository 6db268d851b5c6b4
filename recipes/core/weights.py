# SPDX-License-Identifier: Apache-2.0
"""The files of a pretrained model: read once a host, recognized later, and nothing of them lost."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from transformers import AutoConfig
from transformers import core_model_loading as names
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from core.engine import Layout, read_on_every_rank
from core.workarounds import fsdp_plugin, mixed_dtype

SAMPLES = 64  # places of a file that are read: reading all of a large one would take minutes
SAMPLE_BYTES = 4096


# ---- Read ----
def load_pretrained(
    auto_class: Any, layout: Layout, name: str, stays_on_host: bool = False, **options: Any
) -> Any:
    """Return auto_class.from_pretrained(name, **options), with few copies on the host.

    FSDP broadcasts the weights of rank 0, but transformers 5 reads them on every rank
    (modeling_utils.py does not look at the rank): 8 ranks of an 8B model in fp32 would take 256 GB
    of a host. So all but the first rank of a host have weights in memory that nothing touches.
    Under single, DDP and ZeRO-0 to 2 the weights go straight to the GPU, for DeepSpeed in the dtype
    to which it casts them before it makes its master weights. Two cases are left to transformers:
    ZeRO-3, which splits weights while it loads, and models with new weights, which must be drawn on
    the host whatever the device.

    Args:
        auto_class: of transformers, such as AutoModelForCausalLM.
        stays_on_host: whether an extra takes the weights to the GPU one after another.
        options: further arguments of from_pretrained, dtype, attn_implementation and
            output_loading_info=True among them.
    """
    accelerator = layout.accelerator
    plugin = fsdp_plugin(accelerator)
    zero = accelerator.state.deepspeed_plugin
    is_quantized = options.get("quantization_config") is not None
    if layout.splits_weights:
        return layout.from_pretrained(auto_class, name, **options)
    if plugin is None:
        draws_head = {"id2label", "num_labels"} & options.keys()
        if not draws_head and (zero is None or zero.zero_stage < 3):
            if zero and mixed_dtype(accelerator) and not is_quantized:
                options["dtype"] = mixed_dtype(accelerator)
            if accelerator.device.type == "cuda" and not stays_on_host:
                options["device_map"] = {"": accelerator.device}
    elif accelerator.num_processes > 1 and plugin.cpu_ram_efficient_loading and not is_quantized:
        device_map = None if accelerator.is_local_main_process else "meta"
        model, report = layout.from_pretrained(auto_class, name, device_map=device_map, **options)
        if can_be_broadcast(model, accelerator):
            reserve_memory(model)
            return model, report
        read_on_every_rank(accelerator)
    return layout.from_pretrained(auto_class, name, **options)


def make_skeleton(
    auto_class: Any, name: str, dtype: str, attn_implementation: str | None, **of_config: Any
) -> Any:
    """Return the model of a config: parameters on the meta device, buffers with their values."""
    config = AutoConfig.from_pretrained(name, **of_config)
    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()
    return model


def can_be_broadcast(model: torch.nn.Module, accelerator: Accelerator) -> bool:
    """Return whether FSDP can broadcast all of the model's tensors.

    FSDP1 leaves out ignored modules; accelerate's broadcast for FSDP2 fails for buffers that are
    saved, such as BART's final_logits_bias.
    """
    saved = model.state_dict()
    has_saved_buffers = any(name in saved for name, _ in model.named_buffers())
    return fsdp_plugin(accelerator).ignored_modules is None and not has_saved_buffers


def reserve_memory(model: torch.nn.Module) -> None:
    """Move parameters off the meta device, to memory that is never written to and takes no room.

    accelerate distinguishes them by their address.
    """
    # By the old weight, so that tied weights share the new one
    reserved: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is None or not weight.is_meta:
                continue
            if weight not in reserved:
                empty = torch.empty_like(weight, device="cpu")
                reserved[weight] = torch.nn.Parameter(empty, weight.requires_grad)
            module._parameters[key] = reserved[weight]


# ---- Recognize ----
def find_folder(name: str, revision: str) -> Path | None:
    """Return the folder with a model's files, also that of the hub's cache; None without one."""
    if Path(name).is_dir():
        return Path(name)
    try:
        config = cached_file(name, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if config is None else Path(config).parent


def files_of_weights(name: str, revision: str) -> list[Path]:
    """Return the files from which from_pretrained reads weights, as far as they are here."""
    folder = find_folder(name, revision)
    if folder is None:
        return []
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def files_of_tensors(name: str, revision: str) -> dict[str, Path]:
    """Return {tensor: its file} of a folder or hub id, as far as it is on this machine."""
    found: dict[str, Path] = {}
    for path in files_of_weights(name, revision):
        found |= dict.fromkeys(load_state_dict(path, map_location="meta"), path)
    return found


def fingerprint_of_weights(name: str, revision: str) -> str | None:
    """Return the fingerprint of a base's files, 64 hexadecimal digits; None if there are none.

    Adapters belong to the weights that they were trained on. A folder may be overwritten, and a
    branch on the hub may move: then other weights have the same name and the same shapes. It is
    made of the names and sizes of the files, and of samples of their content.
    """
    digest = hashlib.sha256()
    paths = files_of_weights(name, revision)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        last = max(size - SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(last * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if paths else None


# ---- What has no place in the model ----
def note_left_out(args: Any, model: Any) -> dict[str, str]:
    """Return the summary's line about what a base has and its model has not, if there is any.

    transformers ignores such tensors while it loads, often without a word: layers that predict
    several tokens at once (DeepSeek V3), or the part for images where only the text is trained
    (Qwen3.5). `save_model` finds them at the model. A result of the class of the base keeps them.
    """
    files = files_of_tensors(args.model_name_or_path, args.model_revision)
    placed = find_placed(model, files)
    unplaced = {name: file for name, file in files.items() if name not in placed}
    if not unplaced:
        return {}
    kind = type(model).__name__
    fate = "not in the result"
    kept = {}
    if model.config.architectures == [kind]:
        fate = "kept as they are"
        kept = unplaced
    parts = Counter(parts_without_others(unplaced, placed))
    listed = ", ".join(f"{part} ({number})" for part, number in parts.items())
    words = f"{len(unplaced)} tensors of the base are {fate}: {kind} has no {listed}"
    model.left_out = (words, kept)
    return {"base files": words}


def find_placed(model: Any, tensors: Collection[str]) -> set[str]:
    """Return those tensors that a model has a place for.

    As `convert_and_load_state_dict_in_model` of transformers, but without what a class ignores.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, names.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, names.WeightConverter)]
    weights = model.state_dict()
    prefix = model.base_model_prefix
    placed = set()
    for name in sorted(tensors, key=names.dot_natural_key):
        place, _ = names.rename_source_key(name, renamings, converters, prefix, weights)
        if place in weights or name in weights:
            placed.add(name)
    return placed


def parts_without_others(tensors: Collection[str], others: Collection[str]) -> Iterator[str]:
    """Yield the shortest beginning of each name that no other has, as in "model.visual.*"."""
    taken: set[str] = set()
    for other in others:
        taken.update(accumulate(other.split("."), "{}.{}".format))
    for name in tensors:
        own = accumulate(name.split(".")[:-1], "{}.{}".format)
        yield next((f"{beginning}.*" for beginning in own if beginning not in taken), name)


def read_left_out(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the result keeps of the base, and say what is kept or is not."""
    words, files = getattr(model, "left_out", ("", {}))  # Only on rank 0
    if words:
        print(words, flush=True)
    held: dict[str, torch.Tensor] = {}
    for path in set(files.values()):
        held |= load_state_dict(path)
    return {name: held[name].clone() for name in files}
