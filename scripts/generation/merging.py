# SPDX-License-Identifier: Apache-2.0
"""What merge.py does: adapters become part of their base, by peft, and are compared with it."""

import argparse
import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import disable_progress_bars
from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from core.generation import listed_stop_tokens
from core.weights import files_of_tensors, find_folder
from exits import Exit, first_line, stop
from generation.loading import LOAD_ERRORS, add_adapters, arguments_of_run, find_source
from generation.trained import (
    ROUNDING,
    SIXTEEN_BITS,
    Answers,
    Trained,
    count_same,
    find_problems,
    largest_gap,
    read_trained,
)

# An int8 base also rounds activations to 8 bits, which no merged model does
INT8_ACTIVATIONS = 0.15
# Adapters of a quantized base on the 16-bit one: what quantization changed is not trained away. The
# logits of two unrelated models differ by about the largest logit.
OTHER_BASE = 0.5
UNFINISHED = ".unfinished"  # ending of the folder's name until it is complete and compared


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of merge.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
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
    try:
        folder.mkdir(parents=True)
        merged = merge(trained, base, args.dtype)
        write_folder(folder, merged, trained, args.dtype, reference.stop_tokens)
        del merged
    except (OSError, SafetensorError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {first_line(error)}")
    reloaded = reload(folder, trained, reference)
    gap = largest_gap(reference, reloaded)
    bound = args.bound or relative_bound(trained, base, reference.dtype, reloaded.dtype)
    bound *= reference.largest_logit
    for source, number in trained.sources.items():
        print(f"{number} prompts: {source}")
    print(f"The largest logit gap without the adapters is {without:.2e}")
    same = f"{count_same(reference, reloaded)} of {len(reference.tokens)} answers are the same"
    print(f"The largest logit gap of the merged model is {gap:.2e}, its bound {bound:.2e}; {same}")
    if not gap <= bound:  # also if it is not a number
        differ(folder, f"a logit differs by {gap:.3g}, and the bound is {bound:.3g}")
    folder.rename(args.output)
    print(f"The merged model is in {args.output}")


def new_folder(output: Path) -> Path:
    """Return the place where a folder is written until it is complete and compared.

    Raises SystemExit with 73 if there is something, or at the place of the complete folder.
    """
    unfinished = output.with_name(output.name + UNFINISHED)
    for folder in (output, unfinished):
        if folder.exists() or folder.is_symlink():
            stop(Exit.CANNOT_WRITE, f"{folder} exists; name a new folder, or remove it")
    return unfinished


def differ(folder: Path, what: str) -> NoReturn:
    """End with 76, since what was made is not what was trained."""
    stop(Exit.DIFFERS, f"{what}; what was made is in {folder}")


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
        names = f"adapter_config.json names the base {source.base}"
        stop(
            Exit.DATA,
            f"{args.adapter}: {names}, but run.json says that the adapters were trained on "
            f"{trained_on}; correct the one that is wrong",
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
    if base_name == SIXTEEN_BITS:
        # Not in a narrower type than the files have, so that a sum is rounded once
        base = trained.load_base(base_name, "float32" if dtype == "float32" else "auto")
    else:
        base = trained.load_base(base_name).dequantize()
    wanted = getattr(torch, dtype, None) or trained.config.get_text_config().dtype or base.dtype
    head = base.get_output_embeddings()
    is_tied = head.weight is base.get_input_embeddings().weight
    if is_tied:  # peft would change both where adapters change one of them
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model = add_adapters(base, trained.source)
    adapted: dict[Any, list[Any]] = {}  # {module of the base: its adapters, several for experts}
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            adapted.setdefault(layer.get_base_layer(), []).append(layer)
    for module, layers in adapted.items():
        module.float()
        for layer in layers:
            layer.merge()
        round_weights(module, wanted)
    with warnings.catch_warnings(action="ignore"):  # that all adapters are merged already
        merged: Any = model.merge_and_unload()
    round_weights(merged, wanted)
    head = merged.get_output_embeddings()
    embedding = merged.get_input_embeddings()
    if is_tied and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    return merged.eval()


def round_weights(module: Any, dtype: torch.dtype) -> None:
    """Round the weights of a module, but not its buffers, such as those of positions."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)


def relative_bound(trained: Trained, base_name: str, *dtypes: str) -> float:
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
def write_folder(
    folder: Path, model: Any, trained: Trained, dtype: str, stop_tokens: Sequence[int]
) -> None:
    """Write a merged model with its tokenizer, and with all tokens that end an answer.

    The config is that of the base, changed where the merged model is another. Raises OSError.

    Args:
        dtype: of the weights; auto for that of the base's files.
    """
    write_weights(folder, model, trained, dtype)
    base = find_folder(trained.source.weights, trained.source.revision)
    assert base is not None, "its weights were loaded"
    config = read_json(base / "config.json")
    for part in (config, config.get("text_config", {}), config.get("llm_config", {})):
        if part.get("tie_word_embeddings", part is config) and not names_of_tied(model):
            part["tie_word_embeddings"] = False
        for key in ("dtype", "torch_dtype"):
            if key in part and dtype != "auto":
                part[key] = dtype
    write_json(folder / "config.json", config)
    generation = {"pad_token_id": trained.tokenizer.pad_token_id}
    if (base / "generation_config.json").is_file():
        generation |= read_json(base / "generation_config.json")
    generation["eos_token_id"] = list(stop_tokens)
    write_json(folder / "generation_config.json", generation)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        trained.source.tokenizer, revision=trained.source.revision, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
    for path in (*base.glob("LICENSE*"), *base.glob("NOTICE*")):
        shutil.copyfile(path, folder / path.name)


def write_weights(folder: Path, model: Any, trained: Trained, dtype: str) -> None:
    """Write the weights of a merged model with the names and in the files of its base.

    A tensor that the merge has left as it was is the base's own, also one that the model has no
    place for. Raises OSError.
    """
    files = files_of_tensors(trained.source.weights, trained.source.revision)
    tied = names_of_tied(model)
    merged = {name: weight.detach() for name, weight in model.named_parameters()}
    head = model.get_output_embeddings().weight
    # A head that was tied to the embedding, and is so no longer, is in no file
    if any(name not in files and weight is not head for name, weight in model.named_parameters()):
        merged = revert_weight_conversion(model, merged)  # Most files have the names of the hub
    unknown = merged.keys() - files.keys()
    if len(unknown) > 1:
        stop(Exit.DATA, f"{trained.source.base}: its files lack {min(unknown)} and others")
    shards = sorted(set(files.values()))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, path in enumerate(shards, 1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, weight in load_state_dict(path).items():
            if name not in tied:
                changed = merged.pop(name, weight).cpu()
                tensors[name] = choose(weight, changed, trained.dtype, dtype).contiguous()
        if number == len(shards):
            tensors |= {name: weight.cpu().contiguous() for name, weight in merged.items()}
        save_file(tensors, folder / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
        num_bytes += sum(weight.nbytes for weight in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def names_of_tied(model: Any) -> set[str]:
    """Return the names of the weights that a model has under another name too."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return names - {name for name, _ in model.named_parameters()}


def choose(
    weight: torch.Tensor, merged: torch.Tensor, trained_in: torch.dtype | None, dtype: str
) -> torch.Tensor:
    """Return a tensor of the base, or where a merge has changed it the merged one.

    Args:
        trained_in: the dtype of the run, into which the base may have been rounded; None for its
            own.
        dtype: of the result; auto for that of the base's tensor.
    """
    if not weight.is_floating_point():
        return weight
    rounded = weight.to(trained_in or weight.dtype)
    chosen = merged
    if any(torch.equal(one.to(merged.dtype), merged) for one in (weight, rounded)):
        chosen = weight
    return chosen.to(getattr(torch, dtype, weight.dtype))


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file. Raises OSError."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
    for name in names_of_tied(model) & files_of_tensors(str(folder), "main").keys():
        differ(folder, f"it has {name}, which is tied to another weight")
    if not listed_stop_tokens(model.generation_config).issuperset(reference.stop_tokens):
        differ(folder, f"its generation config lacks one of {reference.stop_tokens}")
    return trained.ask(model.eval(), reference.tokens)
