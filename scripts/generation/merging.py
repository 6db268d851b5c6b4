# SPDX-License-Identifier: Apache-2.0
"""What merge.py does: adapters become part of their base, by peft, and are compared with it."""

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import disable_progress_bars
from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common import Exit, first_line, stop
from core.export import list_stop_tokens, save_whole, saved_buffers
from core.generation import listed_stop_tokens
from core.weights import files_of_tensors, find_folder, note_left_out
from generation.comparing import (
    ROUNDING,
    SIXTEEN_BITS,
    Answers,
    Trained,
    differ,
    judge,
    largest_gap,
    new_folder,
    read_trained,
)
from generation.loading import LOAD_ERRORS, MAIN, add_adapters, arguments_of_run, find_source

# An int8 base also rounds activations to 8 bits, which no merged model does
INT8_ACTIVATIONS = 0.15
# Adapters of a quantized base on the 16-bit one: what quantization changed is not trained away. The
# logits of two unrelated models differ by about the largest logit.
OTHER_BASE = 0.5


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of merge.py; exit with a code and one line if that fails."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    folder = new_folder(args.output)
    trained = read_adapters(args)
    bases = list(dict.fromkeys([SIXTEEN_BITS, trained.base_name]))
    if args.base not in ("auto", *bases):
        stop(Exit.USAGE, f"--base {args.base}: the run was on the {bases[-1]} base, by run.json")
    model = trained.load()
    check_adapters(model, trained.source.name)
    reference = trained.ask(model)
    with model.disable_adapter():
        without = largest_gap(reference, trained.ask(model, reference.tokens))
    del model
    base = args.base
    if base == "auto":
        base = nearest_base(trained, bases, reference, args.dtype)
    merged = merge(trained, base, args.dtype)
    try:
        write_folder(folder, merged, trained, reference.stop_tokens)
    except (OSError, SafetensorError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {first_line(error)}")
    del merged
    reloaded = reload(folder, trained, reference)
    for source, number in trained.sources.items():
        print(f"{number} prompts: {source}")
    print(f"The largest logit gap without the adapters is {without:.2e}")
    bound = args.bound or relative_bound(trained, base, reference.dtype, reloaded.dtype)
    judge("merged model", folder, reference, reloaded, bound)
    folder.rename(args.output)
    print(f"The merged model is in {args.output}")


# ---- Adapters ----
def read_adapters(args: argparse.Namespace) -> Trained:
    """Return a folder of adapters, but for its weights, with its prompts.

    Raises SystemExit with 64 if the folder has no adapters, with 65 if they cannot be merged.
    """
    source = find_source(args.adapter)
    if source.base is None:
        stop(Exit.USAGE, f"{args.adapter}: no adapter_config.json, so nothing to merge")
    try:
        task = PeftConfig.from_pretrained(args.adapter).task_type
    except LOAD_ERRORS as error:
        stop(Exit.DATA, f"{args.adapter}/adapter_config.json: {first_line(error)}")
    if task != "CAUSAL_LM":  # An encoder would be loaded with a head that nothing has trained
        stop(Exit.DATA, f"{args.adapter}: its task is {task}, and only CAUSAL_LM is merged")
    trained_on = arguments_of_run(args.adapter).get("model_name_or_path", source.base)
    # A relative path is one from the folder in which the training was started
    is_known = Path(trained_on).exists() or not Path(source.base).is_absolute()
    if is_known and Path(trained_on).resolve() != Path(source.base).resolve():
        stop(
            Exit.DATA,
            f"{args.adapter}: adapter_config.json names the base {source.base}, but run.json says "
            f"that the adapters were trained on {trained_on}; correct the one that is wrong",
        )
    trained = read_trained(source, args)
    if getattr(trained.config, "quantization_config", None):
        fix = "name the model that it was made from in adapter_config.json and run.json"
        stop(Exit.DATA, f"{source.base}: its files are quantized, which cannot be merged; {fix}")
    return trained


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
def nearest_base(trained: Trained, bases: Sequence[str], reference: Answers, dtype: str) -> str:
    """Return the name of the base with which merged adapters say most nearly what was trained."""
    if len(bases) == 1:
        return bases[0]
    gaps = {}
    for name in bases:
        merged = trained.ask(merge(trained, name, dtype), reference.tokens)
        gap = largest_gap(reference, merged)
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
    if base_name == SIXTEEN_BITS:
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


def relative_bound(trained: Trained, base_name: str, *dtypes: torch.dtype) -> float:
    """Return the bound of a logit gap, as a part of the largest logit.

    Args:
        base_name: of the base that the adapters were merged into.
        dtypes: of the trained and of the merged weights.
    """
    bounds = [ROUNDING.get(dtype, 0.0) for dtype in dtypes]
    if base_name != trained.base_name:
        bounds.append(OTHER_BASE)
    if trained.base_name == "8bit":
        bounds.append(INT8_ACTIVATIONS)
    return max(bounds)


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
    tokenizer: Any = AutoTokenizer.from_pretrained(
        source.tokenizer, revision=source.revision, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
    base = find_folder(source.weights, source.revision)
    assert base is not None, "its weights were loaded"
    for path in (*base.glob("LICENSE*"), *base.glob("NOTICE*")):
        shutil.copyfile(path, folder / path.name)


def reload(folder: Path, trained: Trained, reference: Answers) -> Answers:
    """Return what a merged folder says, loaded as its users will.

    Raises SystemExit with 76 if anything but a logit is not as it was trained.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.chat_template != trained.tokenizer.chat_template:
        differ(folder, "it has another chat template")
    for prompt in trained.prompts:
        adds = prompt.conversation is None
        if tokenizer(prompt.text, add_special_tokens=adds)["input_ids"] != prompt.tokens:
            differ(folder, "its tokenizer makes other tokens")
    model, report = AutoModelForCausalLM.from_pretrained(
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
    if not listed_stop_tokens(model.generation_config).issuperset(reference.stop_tokens):
        differ(folder, f"its generation config lacks one of {reference.stop_tokens}")
    return trained.ask(model.eval(), reference.tokens)
