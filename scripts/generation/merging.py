# SPDX-License-Identifier: Apache-2.0
"""What merge.py does: adapters become part of their base, by peft, and are compared with it."""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer

import vlm
from common import Exit, stop
from core import checkpoint
from core.chat import ChatTemplate
from core.export import list_stop_tokens, save_whole, saved_buffers
from core.generation import listed_stop_tokens
from core.model import load_tokenizer
from core.weights import files_of_tensors, note_left_out
from generation import comparing
from generation.comparing import Trained, differ
from generation.loading import (
    MAIN,
    Source,
    add_adapters,
    auto_class_of,
    be_quiet,
    find_source,
    load_weights,
)
from tasks.illustrated import IllustratedTemplate

# An int8 base also rounds activations to 8 bits, which no merged model does
INT8_ACTIVATIONS = 0.15
# Adapters of a quantized base on the 16-bit one: what quantization changed is not trained away. The
# logits of two unrelated models differ by about the largest logit.
OTHER_BASE = 0.5
BYTES_OF_A_FILE = 5 * 10**9  # of a joined folder, whose writing takes as much memory


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of merge.py; exit with a code and one line if that fails."""
    be_quiet()
    folder = comparing.new_folder(args.output)
    try:
        if Path(args.adapter, checkpoint.BOXES).is_file():
            join(Path(args.adapter), folder, args.dtype)
        else:
            merge_adapters(args, folder)
    except (OSError, SafetensorError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {error}")
    folder.rename(args.output)
    print(f"The merged model is in {args.output}")


def merge_adapters(args: argparse.Namespace, folder: Path) -> None:
    """Write the folder of a merged model, and compare it with the trained one.

    Raises SystemExit with 64 if the folder has no adapters, with 65 if they cannot be merged.
    """
    source = find_source(args.adapter)
    if source.base is None:
        stop(Exit.USAGE, f"{args.adapter}: no adapter_config.json, so nothing to merge")
    task = json.loads(Path(args.adapter, "adapter_config.json").read_text())["task_type"]
    if task != "CAUSAL_LM":  # An encoder would be loaded with a head that nothing has trained
        stop(Exit.DATA, f"{args.adapter}: its task is {task}, and only CAUSAL_LM is merged")
    trained = comparing.read_trained(source, args)
    bases = list(dict.fromkeys([comparing.SIXTEEN_BITS, trained.base_name]))
    if args.base not in ("auto", *bases):
        stop(Exit.USAGE, f"--base {args.base}: the run was on the {bases[-1]} base, by run.json")
    model = trained.load()
    check_adapters(model, trained.source.name)
    reference = trained.ask(model)
    dtype = model.dtype
    del model
    base = args.base
    if base == "auto":
        base = nearest_base(trained, bases, reference, args.dtype)
    merged = merge(trained, base, args.dtype)
    ends = trained.stop_tokens(merged.generation_config)
    write_folder(folder, merged, trained, ends)
    del merged
    reloaded = reload(folder, trained, ends)
    # Of rounding: what the trained model computes in, and the merged one
    bounds = [comparing.ROUNDING[dtype], comparing.ROUNDING[reloaded.dtype]]
    if base != trained.base_name:
        bounds.append(OTHER_BASE)
    if trained.base_name == "8bit":
        bounds.append(INT8_ACTIVATIONS)
    logits = trained.ask(reloaded)
    comparing.judge("merged model", folder, reference, logits, args.bound or max(bounds))


def check_adapters(model: Any, folder: str) -> None:
    """End with 65 if peft lacked some adapters in a file, or had no place for some."""
    expected = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    found = load_peft_weights(folder, device="cpu").keys()
    unknown = {name for name in found - expected if ".lora_" in name}
    for what, names in (("lacks", expected - found), ("has no place for", unknown)):
        if names:
            fix = "they are damaged, or of another base"
            stop(Exit.DATA, f"{folder}: the model of these adapters {what} {min(names)}; {fix}")


# ---- Merge ----
def nearest_base(
    trained: Trained, bases: Sequence[str], reference: Sequence[torch.Tensor], dtype: str
) -> str:
    """Return the name of the base with which merged adapters say most nearly what was trained."""
    if len(bases) == 1:
        return bases[0]
    gaps = {}
    for name in bases:
        gap = comparing.largest_gap(reference, trained.ask(merge(trained, name, dtype)))
        print(f"Merged into the {name} base, the largest logit gap is {gap:.2e}")
        gaps[name] = gap if math.isfinite(gap) else math.inf
    nearest = min(gaps, key=gaps.__getitem__)
    print(f"Merging into the {nearest} base, the nearer one")
    return nearest


def merge(trained: Trained, base_name: str, dtype: str) -> Any:
    """Return the base of adapters with these merged into it.

    Args:
        base_name: 16bit, or the name of the quantized base, whose values are then used.
        dtype: of the merged weights; auto for that of the base's files.
    """
    wanted = getattr(torch, dtype, None) or trained.config.get_text_config().dtype
    if base_name == comparing.SIXTEEN_BITS:
        base = trained.load_base(base_name, torch.float32 if dtype == "float32" else "auto")
    else:
        base = trained.load_base(base_name).dequantize()
    head = base.get_output_embeddings()
    is_tied = head.weight is base.get_input_embeddings().weight
    if is_tied:  # peft would change both where adapters change one of them
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    merged: Any = add_adapters(base, trained.source).merge_and_unload(safe_merge=True)
    for weight in merged.parameters():  # Not its buffers, such as those of positions
        weight.data = weight.data.to(wanted or base.dtype)
    head = merged.get_output_embeddings()
    embedding = merged.get_input_embeddings()
    if is_tied:
        merged.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)
        if merged.config.tie_word_embeddings:
            head.weight = embedding.weight
    return merged.eval()


# ---- The merged folder ----
def write_folder(folder: Path, model: Any, trained: Trained, stop_tokens: Sequence[int]) -> None:
    """Write a merged model as a run writes its own, with its tokenizer. Raises OSError."""
    folder.mkdir(parents=True)
    source = trained.source
    note_left_out(
        SimpleNamespace(model_name_or_path=source.weights, model_revision=source.revision), model
    )
    tensors = [*model.named_parameters(), *saved_buffers(model)]
    list_stop_tokens(model, stop_tokens)
    save_whole(model, folder, {name: tensor.detach().cpu() for name, tensor in tensors})
    auto_class = AutoProcessor if source.reads_images else AutoTokenizer
    processor: Any = auto_class.from_pretrained(
        source.tokenizer, revision=source.revision, trust_remote_code=False
    )
    processor.save_pretrained(folder)
    for path in Path(source.weights).glob("LICENSE*"):
        shutil.copyfile(path, folder / path.name)


def reload(folder: Path, trained: Trained, stop_tokens: Sequence[int]) -> Any:
    """Return the model of a merged folder, loaded as its users will.

    Raises SystemExit with 76 if anything but a logit is not as it was trained.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.chat_template != trained.tokenizer.chat_template:
        differ(folder, "it has another chat template")
    for prompt in trained.prompts:
        if comparing.tokens_of(prompt, tokenizer) != comparing.tokens_of(prompt, trained.tokenizer):
            differ(folder, "its tokenizer makes other tokens")
    model, report = auto_class_of(Source(str(folder))).from_pretrained(
        folder,
        dtype="auto",
        device_map=trained.device,
        output_loading_info=True,
        trust_remote_code=False,
    )
    for name in report["missing_keys"]:
        differ(folder, f"it lacks {name}")
    written = files_of_tensors(str(folder), MAIN)
    single = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in single and name in written:
            differ(folder, f"it has {name}, which is tied to another weight")
    if not listed_stop_tokens(model.generation_config).issuperset(stop_tokens):
        differ(folder, f"its generation config lacks one of {stop_tokens}")
    return model.eval()


# ---- A checkpoint ----
def join(state: Path, folder: Path, dtype: str) -> None:
    """Write the folder with which the run of a checkpoint would have ended there.

    It takes no more memory than a file of the folder, and twice its room on the disk.

    Raises SystemExit with 65 if the checkpoint is damaged or has not all weights.

    Args:
        state: the folder of the checkpoint.
        dtype: of the written weights; auto for that of the run.
    """
    damage = checkpoint.find_damage(state)
    if damage is not None:
        stop(Exit.DATA, f"{state}: {damage}")
    trained: Any = SimpleNamespace(**checkpoint.read_progress(state)["arguments"])
    if trained.use_peft:
        stop(Exit.USAGE, f"{state}: is of adapters: end its run, and merge the run's folder")
    wanted = getattr(torch, trained.dtype if dtype == "auto" else dtype)
    source = Source(trained.model_name_or_path, revision=trained.model_revision)
    model = load_weights(source, wanted, "meta", None)
    note_left_out(trained, model)
    places = model.state_dict()
    folder.mkdir(parents=True)
    parts = folder / "parts"
    parts.mkdir()
    weights = {}
    saved = checkpoint.saved_tensors(state)
    names = [name for name in saved if not checkpoint.is_of_optimizer(name)]
    for number, (name, tensor) in enumerate(checkpoint.read_whole(state, names)):
        # Only this one is in memory: a tensor that is loaded from a file stays there
        path = parts / f"{number}.safetensors"
        save_file({name: tensor.to(places[name].dtype)}, path)
        weights |= load_file(path)
    lacking = {name for name, _ in model.named_parameters()} - weights.keys()
    if lacking:
        stop(Exit.DATA, f"{state}: has no {min(lacking)}, which its run has not trained")
    processor = tokenizer = load_tokenizer(trained)
    stop_tokens = {tokenizer.eos_token_id} - {None}
    if source.reads_images:
        processor = vlm.load_processor(trained)
        stop_tokens = IllustratedTemplate(processor.tokenizer, {}, processor).stop_tokens()
    elif hasattr(trained, "chat_template"):
        stop_tokens = ChatTemplate(tokenizer).stop_tokens()
    list_stop_tokens(model, stop_tokens)
    save_whole(model, folder, weights, max_shard_size=BYTES_OF_A_FILE)
    shutil.rmtree(parts)
    processor.save_pretrained(folder)
