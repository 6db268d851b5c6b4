# SPDX-License-Identifier: Apache-2.0
"""A trained folder: a model, or adapters and their base; and what its run has recorded there."""

import json
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from common import Exit, find_missing, first_line, stop
from core.weights import fingerprint_of_weights

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
RUN = "run.json"
PUBLIC_RUN = "run_public.json"  # What scripts/push.py publishes of it
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
    def is_local(self) -> bool:
        """Return whether the whole model is a folder, and not on the hub."""
        return Path(self.weights).is_dir()

    @property
    def tokenizer(self) -> str:
        """Return the folder or hub id of the tokenizer, which adapters may lack."""
        if (Path(self.name) / "tokenizer_config.json").is_file():
            return self.name
        return self.weights


# ---- What is in a folder ----
def find_source(name: str) -> Source:
    """Return the source of the model in a folder, or of a hub id.

    Raises SystemExit with 64 if it is neither, with 65 for adapters without weights, and for those
    whose base is missing or has other weights than it had in training.
    """
    missing = find_missing(name)
    if missing is not None:
        stop(Exit.USAGE, f"{missing}; give the --output_dir of a training run")
    folder = Path(name)
    adapter_config = folder / "adapter_config.json"
    if adapter_config.is_file():
        source = read_adapter_source(name, adapter_config)
        if not any((folder / weights).is_file() for weights in ADAPTER_WEIGHTS):
            fix = "give the --output_dir of a finished run"  # peft would ask the hub for them
            stop(Exit.DATA, f"{name}: has no {ADAPTER_WEIGHTS[0]}; {fix}")
        check_base_weights(source)
        return source
    if folder.exists() and not (folder / "config.json").is_file():
        problem = "no config.json or adapter_config.json in it"
        stop(Exit.USAGE, f"{name}: {problem}; give the --output_dir of a finished run")
    return Source(name)


def read_adapter_source(name: str, adapter_config: Path) -> Source:
    """Return adapters on the base that their configuration names."""
    try:
        config = json.loads(adapter_config.read_text(encoding="utf-8"))
        base = config["base_model_name_or_path"]
    except (ValueError, LookupError, TypeError):
        config = {}
        base = None
    if not isinstance(base, str):
        stop(Exit.DATA, f"{adapter_config}: not JSON with a base_model_name_or_path")
    if find_missing(base) is not None:
        fix = f"put it back or correct {adapter_config}"
        stop(Exit.DATA, f"{name}: its base model {base} is missing; {fix}")
    return Source(name, base, config.get("revision") or MAIN)


def check_base_weights(source: Source) -> None:
    """End with 65 if the base of adapters has other weights than their run recorded, if it did."""
    recorded = run_of(source.name).get("base_weights")
    if recorded is None or source.base is None:
        return
    if fingerprint_of_weights(source.base, source.revision) not in (None, recorded):
        name = record_of(source.name).name
        fix = f"put those back, or remove base_weights from {name} if only their files changed"
        what = "are not those that the adapters were trained on"
        stop(Exit.DATA, f"the weights in {source.base} {what}; {fix}")


def base_of(source: Source) -> Source:
    """Return the model with which the training of a source began. Raises SystemExit with 65."""
    if source.base is not None:
        return Source(source.base, revision=source.revision)
    arguments = arguments_of_run(source.name)
    base = arguments.get("model_name_or_path")
    if base is None or find_missing(base) is not None:
        record = record_of(source.name)
        stop(Exit.DATA, f"--with_base: {record} names no base that is here: {base}")
    return Source(base, revision=arguments.get("model_revision") or MAIN)


# ---- The record of a run ----
def record_of(name: str) -> Path:
    """Return the file with the record of the run that wrote a folder; it may not be there."""
    path = Path(name, RUN)
    public = Path(name, PUBLIC_RUN)
    if public.is_file() and not path.is_file():
        return public
    return path


def run_of(name: str) -> dict[str, Any]:
    """Return the record of the run that wrote a folder; {} without one.

    Raises SystemExit with 65 if the file cannot be read.
    """
    path = record_of(name)
    if not path.is_file():
        return {}
    try:
        run = json.loads(path.read_text())
        dict(run["arguments"])
    except (ValueError, LookupError, TypeError):
        stop(Exit.DATA, f"{path}: has no arguments of a run, from which prompts are built")
    return run


def arguments_of_run(name: str) -> dict[str, Any]:
    """Return the arguments of the run that wrote a folder; {} without its record."""
    return run_of(name).get("arguments", {})


def template_settings_of(name: str) -> dict[str, Any]:
    """Return the variables of the chat template that a run trained with."""
    return dict(arguments_of_run(name).get("chat_template_kwargs") or {})


# ---- Loading ----
def default_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def load_tokenizer(source: Source, needs_template: bool = True) -> Any:
    """Return the tokenizer, padding on the left.

    Raises SystemExit with 65 also for one without the chat template that is needed.
    """
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
    if needs_template and not tokenizer.chat_template:
        fix = "recipes/llama.py saves one with the model"
        stop(Exit.DATA, f"{name}: its tokenizer has no chat template; {fix}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: Source, dtype: str, device: str, load_in_4bit: bool = False) -> Any:
    """Return the model in evaluation mode.

    Args:
        dtype: of the weights, "auto" for that of the files; with 4-bit weights that of the
            products, where "auto" is bfloat16.
    """
    model = load_weights(source, dtype, device, nf4(dtype) if load_in_4bit else None)
    if source.base is not None:
        model = add_adapters(model, source)
    return model.eval()


def nf4(dtype: str) -> BitsAndBytesConfig:
    """Return the quantization of 4-bit weights whose products have a dtype; "auto" is bfloat16."""
    compute = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )


def load_weights(
    source: Source, dtype: Any, device: str, quantization: BitsAndBytesConfig | None
) -> Any:
    """Return the whole model of a source, without its adapters. Raises SystemExit with 65 or 69."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            source.weights,
            dtype=dtype,
            device_map=device,
            revision=source.revision,
            trust_remote_code=False,
            quantization_config=quantization,
        )
    except LOAD_ERRORS as error:
        refuse_to_load(source, error)


def add_adapters(model: Any, source: Source, adapter_name: str = "default") -> PeftModel:
    """Return a model with the adapters of a source; those that it already has remain.

    Args:
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
