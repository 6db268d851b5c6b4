# SPDX-License-Identifier: Apache-2.0
"""A trained folder: a model, or adapters and the base that they belong to."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from core.weights import fingerprint_of_weights
from exits import Exit, first_line, stop
from generation.hub import refuse_without_hub
from generation.recorded import find_run, read_run
from hub_ids import find_missing

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAIN = "main"  # the revision of a model on the hub that is taken if none is named
LOAD_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    KeyError,
    TypeError,
    SafetensorError,
    UnpicklingError,  # a .bin file with more than tensors, which torch refuses
)


@dataclass(frozen=True)
class Source:
    """Where a model is: a folder or a hub id, and the base of the adapters that are in it.

    Attributes:
        base: None for a whole model.
        revision: branch, tag or commit of the whole model, if that is on the hub.
    """

    name: str
    base: str | None = None
    revision: str = MAIN

    @property
    def weights(self) -> str:
        """Return the folder or hub id of the whole model."""
        if self.base is None:
            return self.name
        return self.base

    @property
    def label(self) -> str:
        """Return the name, with the revision of a model on the hub if it is another than main."""
        if self.base is not None or self.is_local or self.revision == MAIN:
            return self.name
        return f"{self.name}@{self.revision}"

    @property
    def is_local(self) -> bool:
        """Return whether the whole model is a folder, and not on the hub."""
        return Path(self.weights).is_dir()

    @property
    def tokenizer(self) -> str:
        """Return the folder or hub id of the tokenizer, which adapters may lack."""
        if (Path(self.name) / "tokenizer_config.json").is_file():
            return self.name
        return self.weights


def default_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def find_device_problem(device: str) -> Iterator[str]:
    """Yield why torch cannot use a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        yield f"--device {device}: {first_line(error)}"


def find_model(name: str) -> Source:
    """Return the source of a model that is to be loaded: `find_source`, with its base checked.

    Raises SystemExit with 65 also for a base with other weights than those of the training.
    """
    source = find_source(name)
    check_adapter_weights(source)
    check_base_weights(source)
    return source


def find_source(name: str) -> Source:
    """Return the source of the model in a folder, or of a hub id.

    Raises SystemExit with 64 if it is neither, with 65 for adapters whose base is missing, with 69
    for what only the hub can have if that is out of reach.
    """
    refuse_missing(name)
    refuse_without_hub(name)
    folder = Path(name)
    adapter_config = folder / "adapter_config.json"
    if adapter_config.is_file():
        return read_adapter_source(name, adapter_config)
    if folder.exists() and not (folder / "config.json").is_file():
        problem = "no config.json or adapter_config.json in it"
        stop(Exit.USAGE, f"{name}: {problem}; give the --output_dir of a finished run")
    return Source(name)


def refuse_missing(name: str) -> None:
    """End with 64 if a name can only be that of a folder, and there is none."""
    missing = find_missing(name)
    if missing is not None:
        stop(Exit.USAGE, f"{missing}; give the --output_dir of a training run")


def read_adapter_source(name: str, adapter_config: Path) -> Source:
    """Return adapters on the base that their configuration names."""
    try:
        config = json.loads(adapter_config.read_text(encoding="utf-8"))
        base = config["base_model_name_or_path"]
        revision = config.get("revision") or MAIN
    except (ValueError, KeyError, TypeError):
        base = None
        revision = MAIN
    if not isinstance(base, str):
        stop(Exit.DATA, f"{adapter_config}: not JSON with a base_model_name_or_path")
    if find_missing(base) is not None:
        fix = f"put it back or correct {adapter_config}"
        stop(Exit.DATA, f"{name}: its base model {base} is missing; {fix}")
    refuse_without_hub(base)
    return Source(name, base, revision)


def check_adapter_weights(source: Source) -> None:
    """End with 65 if a folder of adapters has none: peft would look for them on the hub."""
    folder = Path(source.name)
    if source.base is not None and not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        fix = "give the --output_dir of a finished run"
        stop(Exit.DATA, f"{source.name}: has no {ADAPTER_WEIGHTS[0]}; {fix}")


def source_of_base(source: Source, arguments: Mapping[str, Any]) -> Source | None:
    """Return the model with which the training of a source began; None if it is not known.

    Args:
        arguments: of the run.
    """
    if source.base is not None:
        return Source(source.base, revision=source.revision)
    base = arguments.get("model_name_or_path")
    if not isinstance(base, str):
        return None
    return Source(base, revision=arguments.get("model_revision") or MAIN)


def check_base_weights(source: Source) -> None:
    """End with 65 if the base of adapters has other weights than their run recorded, if it did."""
    recorded = read_run(Path(source.name)).get("base_weights")
    if recorded is None or source.base is None:
        return
    found = fingerprint_of_weights(source.base, source.revision)
    if found not in (None, recorded):
        name = find_run(Path(source.name)).name
        fix = f"put those back, or remove base_weights from {name} if only their files changed"
        what = "are not those that the adapters were trained on"
        stop(Exit.DATA, f"the weights in {source.base} {what}; {fix}")


def load_tokenizer(source: Source) -> Any:
    """Return the tokenizer, with or without a chat template, padding on the left."""
    name = source.tokenizer
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, padding_side="left", revision=source.revision, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        if not Path(name).is_dir():
            reason = first_line(error)
            stop(Exit.NO_HUB, f"{name}: no such folder, and not from the hub: {reason}")
        fix = "copy tokenizer*.json of the base model into it"
        stop(Exit.DATA, f"{name}: its tokenizer cannot be loaded; {fix}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_chat_tokenizer(source: Source) -> Any:
    """Return the tokenizer with its chat template, padding on the left."""
    tokenizer = load_tokenizer(source)
    check_chat_template(tokenizer, source)
    return tokenizer


def check_chat_template(tokenizer: Any, source: Source) -> None:
    """End with 65 if a tokenizer has no chat template."""
    if not tokenizer.chat_template:
        fix = "recipes/llama.py saves one with the model"
        stop(Exit.DATA, f"{source.tokenizer}: its tokenizer has no chat template; {fix}")


def load_model(source: Source, dtype: str, device: str, load_in_4bit: bool = False) -> Any:
    """Return the model in evaluation mode.

    dtype: of the weights, "auto" for that of the files; with 4-bit weights that of the products,
        where "auto" is bfloat16.
    """
    check_base_weights(source)
    model = load_weights(source, dtype, device, load_in_4bit)
    if source.base is not None:
        model = add_adapters(model, source)
    return model.eval()


def load_weights(source: Source, dtype: str, device: str, load_in_4bit: bool) -> Any:
    """Return the whole model of a source, without its adapters; arguments as in `load_model`."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "device_map": device,
        "revision": source.revision,
        "trust_remote_code": False,
    }
    if load_in_4bit:
        options["quantization_config"] = nf4(dtype)
    try:
        return AutoModelForCausalLM.from_pretrained(source.weights, **options)
    except LOAD_ERRORS as error:
        refuse_to_load(source, error)


def add_adapters(model: Any, source: Source, adapter_name: str = "default") -> PeftModel:
    """Return a model with the adapters of a source; those that it already has remain.

    model: the base of the source or, with other adapters on the same base, a model of peft.
    adapter_name: of the new adapters in the model of peft, without a dot.
    """
    try:
        if isinstance(model, PeftModel):
            model.load_adapter(source.name, adapter_name)
            return model
        return PeftModel.from_pretrained(model, source.name, adapter_name)
    except LOAD_ERRORS as error:
        refuse_to_load(source, error)


def refuse_to_load(source: Source, error: Exception) -> NoReturn:
    """End with 65, or 69 for a model of the hub, after a line about weights that do not load."""
    code = Exit.DATA if source.is_local else Exit.NO_HUB
    stop(code, f"{source.name}: cannot be loaded: {first_line(error)}")


def nf4(dtype: str) -> BitsAndBytesConfig:
    """Return the configuration of 4-bit weights whose products are computed in `dtype`."""
    compute_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype
    )
