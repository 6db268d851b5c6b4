# SPDX-License-Identifier: Apache-2.0
"""A folder that vLLM serves, its command line, and its receipt.

A whole model is copied; its generation config also lists the end of a turn. Adapters are copied
with the tokenizer and the generation config that they were trained with, since vLLM would otherwise
take those of the base. The folder of the run is not changed.

vLLM itself is not run here: the receipt shows that the files say what was trained, and
`scripts/check_server.py` that a running vLLM does. What vLLM refuses is in `vllm_rules`.
"""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from components import __version__
from exits import Exit, first_line, stop
from exporting import vllm_rules
from exporting.origin import Origin
from generation.loading import Source
from merging import checking, comparing, receipt, shards, trained, writing
from merging.adapter import (
    WEIGHTS,
    AdapterFolder,
    read_adapter_folder,
    read_shapes,
)
from merging.contestants import Contestant, stop_tokens_of
from merging.disk import writing_to
from merging.receipt import Receipt
from merging.session import fail, report

ADAPTER_CONFIG = "adapter_config.json"
CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# What vLLM takes from a generation config as the default of every request: get_diff_sampling_param
# in vllm/config/model.py
SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


def check(source: Source, config: Any, tokenizer: Any) -> None:
    """Exit with 65 and one line if vLLM cannot serve a folder as it was trained.

    Args:
        config: that of the whole model, or of the base of adapters.
    """
    if not Path(source.name).is_dir():
        stop(Exit.USAGE, f"{source.name}: no such folder; vLLM serves hub ids without an export")
    findings = list(vllm_rules.find_large_vocabulary(config, len(tokenizer)))
    if source.base is None:
        findings += vllm_rules.find_in_model(config, CAUSAL)
    else:
        findings += vllm_rules.find_in_adapters(read_adapters(source, config))
    if findings:
        stop(Exit.DATA, f"{source.name}: {vllm_rules.summarize(findings)}")


def read_adapters(source: Source, base: Any) -> vllm_rules.Adapters:
    """Return what is checked of adapters. Raises SystemExit with 65 if they cannot be read."""
    path = Path(source.name) / ADAPTER_CONFIG
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        int(config["r"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        stop(Exit.DATA, f"{path}: not the configuration of adapters: {first_line(error)}")
    shapes = read_shapes(AdapterFolder(source, config, {}, None))
    return vllm_rules.Adapters(source.name, config, shapes, base)


def export(origin: Origin, output: Path, bound: float | None) -> None:
    """Write a folder that vLLM serves, and its receipt; exit with 76 if it has a problem.

    Args:
        bound: of logit gaps, as a part of the largest logit; None for those of `comparing`.
    """
    writing.check_output(output)
    staging = writing.start_staging(output)
    reference = origin.answer()
    facts = facts_of(origin)
    with writing_to(staging):
        if origin.adapter is None:
            write_model(origin, staging, reference)
        else:
            write_adapters(origin, origin.adapter, staging, reference)
    facts["command"] = command_of(origin, output, staging, reference.dtype)
    facts["notes"] = list(find_notes(origin, staging, reference.dtype))
    slip = Receipt(facts, reference)
    found = reload(origin, staging, slip)
    slip.add(found, relative_bound(origin, bound, reference.dtype, found.dtype))
    slip.write(staging)
    report(slip, origin.num_prompts)
    if slip.all_problems:
        fail(slip, f"what was exported is in {staging}")
    writing.finish(staging, output)
    for note in facts["notes"]:
        print(f"note: {note}")
    print(f"The folder for vLLM is {output}, its receipt {output / receipt.NAME}. Serve it:")
    print(facts["command"])


def facts_of(origin: Origin) -> dict[str, Any]:
    """Return what a receipt says of an export beside its comparisons."""
    return {
        "made_by": f"scripts/export.py {__version__}",
        "format": "vllm",
        "rules_of": f"vLLM {vllm_rules.VERSION}, which was read and not run",
        "exported": origin.name,
        "base": origin.source.base,
        "prompts_from": origin.sources,
        "chat_template_kwargs": origin.asking.settings,
    }


def relative_bound(origin: Origin, bound: float | None, *dtypes: str) -> float:
    """Return the bound of a logit gap, as a part of the largest logit.

    Adapters of a quantized base are served on the base as it is.
    """
    if bound is not None:
        return bound
    bounds = [comparing.ROUNDING.get(dtype, 0.0) for dtype in dtypes]
    if is_quantized(origin):
        bounds.append(comparing.OTHER_BASE)
    return max(bounds)


def is_quantized(origin: Origin) -> bool:
    """Return whether adapters were trained on a base that was quantized when it was loaded."""
    return origin.adapter is not None and origin.adapter.quantization is not None


# ---- Files ----
def write_model(origin: Origin, folder: Path, reference: Contestant) -> None:
    """Copy a whole model, with every token that ends an answer in its generation config."""
    source = Path(origin.name)
    files = shards.find_files(origin.name, "main")
    for shard in files.shards:
        shutil.copyfile(shard.path, folder / shard.path.name)
    patterns = ["config.json", *writing.TOKENIZER_PATTERNS, *writing.LICENSE_PATTERNS]
    if files.has_index:
        patterns.append(shards.INDEX)
    writing.copy_files(source, folder, patterns)
    config = read_generation_config(source)
    write_stop_tokens(folder, config, origin.tokenizer, reference)


def write_adapters(
    origin: Origin, adapter: AdapterFolder, folder: Path, reference: Contestant
) -> None:
    """Copy adapters, with the tokenizer and the ends of answers that they were trained with."""
    shutil.copyfile(adapter.path / WEIGHTS, folder / WEIGHTS)
    config = json.loads((adapter.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = absolute_base(adapter)
    writing.write_json(folder / ADAPTER_CONFIG, config)
    writing.copy_tokenizer(folder, adapter)
    of_base = writing.read_json_of_base(adapter, writing.GENERATION_CONFIG) or {}
    write_stop_tokens(folder, of_base, origin.tokenizer, reference)


def absolute_base(adapter: AdapterFolder) -> str:
    """Return the base of adapters as it can be named from any folder."""
    if adapter.source.is_local:
        return str(Path(adapter.base).resolve())
    return adapter.base


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the generation config of a folder, {} without one. Raises SystemExit with 65."""
    path = folder / writing.GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        stop(Exit.DATA, f"{path}: not a JSON object")


def write_stop_tokens(
    folder: Path, config: dict[str, Any], tokenizer: Any, reference: Contestant
) -> None:
    """Write a generation config with all tokens that end an answer.

    vLLM ends at these, and at the tokenizer's own end of a text: update_from_generation_config in
    vllm/sampling_params.py.
    """
    writing.write_generation_config(folder, config, reference.stop_tokens or (), tokenizer)


# ---- The command line ----
def command_of(origin: Origin, output: Path, staging: Path, dtype: str) -> str:
    """Return the command line that serves an exported folder.

    Args:
        output: the place of the folder.
        staging: the folder as long as it is not there.
        dtype: of the trained weights.
    """
    folder = output.resolve()
    if origin.adapter is None:
        words = ["vllm", "serve", str(folder), "--served-model-name", output.name]
    else:
        rank = read_adapters(origin.source, origin.config).rank
        words = ["vllm", "serve", absolute_base(origin.adapter)]
        if origin.adapter.revision != "main":
            words += ["--revision", origin.adapter.revision]
        words += ["--enable-lora", "--lora-modules", f"{output.name}={folder}"]
        words += ["--max-lora-rank", str(vllm_rules.allowed_rank(rank))]
        words += ["--tokenizer", str(folder), "--generation-config", str(folder)]
        if (staging / "chat_template.jinja").is_file():
            words += ["--chat-template", str(folder / "chat_template.jinja")]
    words += ["--dtype", served_dtype(origin, dtype)]
    words += ["--max-model-len", str(longest_text(origin))]
    if origin.asking.settings:
        words += ["--default-chat-template-kwargs", json.dumps(origin.asking.settings)]
    return shlex.join(words)


def served_dtype(origin: Origin, dtype: str) -> str:
    """Return the type in which vLLM is to compute.

    Its kernels of adapters take 16 bits: lora_shrink_op.py in vllm/lora/ops/triton_ops. By default
    it computes in 16 bits what was saved in fp32: _resolve_auto_dtype in vllm/config/model.py.
    """
    if origin.adapter is not None and dtype == "float32":
        return "bfloat16"
    return dtype


def longest_text(origin: Origin) -> int:
    """Return the most tokens of a prompt and its answer.

    The tokenizer's limit counts too: _get_and_verify_max_len in vllm/config/model.py.
    """
    positions = getattr(origin.config.get_text_config(), "max_position_embeddings", None)
    limit = int(origin.tokenizer.model_max_length)
    return limit if positions is None else min(int(positions), limit)


def find_notes(origin: Origin, folder: Path, dtype: str) -> Iterator[str]:
    """Yield what is not a problem of an exported folder, but has to be known.

    Args:
        dtype: of the trained weights.
    """
    if not origin.tokenizer.chat_template:
        yield "without a chat template vLLM only continues texts, at /v1/completions"
    if dtype == "float32" and origin.adapter is not None:
        yield (
            "the run was in float32, but vLLM computes with adapters in 16 bits: merge them to "
            "serve float32"
        )
    elif dtype == "float32":
        yield "--dtype float32 is as it was trained; bfloat16 is faster, and rounds"
    config = read_generation_config(folder)
    sampling = [f"{name}={config[name]}" for name in SAMPLING if config.get(name) is not None]
    if sampling:
        listed = ", ".join(sampling)
        yield f"unless a request says otherwise, vLLM samples by the generation config: {listed}"
    if origin.adapter is None:
        return
    if is_quantized(origin):
        yield (
            "the run was on a quantized base, but vLLM serves the base as it is: scripts/merge.py "
            "compares both, and merges into the nearer one"
        )
    adapters = read_adapters(origin.source, origin.config)
    if adapters.architecture not in vllm_rules.LAYERS:
        yield (
            f"which layers of {adapters.architecture} vLLM adapts is not checked here; it refuses "
            "others when it starts"
        )
    if adapters.config.get("rank_pattern") or adapters.config.get("alpha_pattern"):
        yield (
            f"its layers have several ranks or scales, which vLLM {vllm_rules.VERSION} reads; "
            "earlier versions ignored them without a word"
        )


# ---- The receipt ----
def reload(origin: Origin, folder: Path, slip: Receipt) -> Contestant:
    """Return what the files of an exported folder say, loaded without the folder of the run."""
    tokenizer = checking.load_tokenizer(str(folder))
    if origin.adapter is None:
        files = shards.find_files(str(folder), "main")
        slip.problems += checking.find_problems_of_files(folder, files)
        model, problems = checking.load_folder(folder, origin.device)
        slip.problems += problems
    else:
        exported = read_adapter_folder(str(folder))
        # In the dtype of the run; the base is not quantized, since vLLM does not quantize it
        exported = replace(exported, arguments=origin.arguments)
        model = trained.add_adapters(trained.load_base(exported, None, origin.device), exported)
    stop_tokens = read_stop_tokens(folder)
    return origin.asking.ask("reloaded", model, tokenizer, stop_tokens, slip.reference.tokens)


def read_stop_tokens(folder: Path) -> frozenset[int]:
    """Return the tokens that end an answer by the generation config of a folder."""
    try:
        return stop_tokens_of(GenerationConfig.from_pretrained(folder))
    except OSError as error:
        stop(Exit.DATA, f"{folder / writing.GENERATION_CONFIG}: {first_line(error)}")
