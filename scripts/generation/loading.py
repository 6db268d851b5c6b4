# SPDX-License-Identifier: Apache-2.0
"""A trained folder: a model, or adapters and their base; and what its run has recorded there."""

import contextlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import logging

from common import Exit, find_missing, stop
from core.chat import ChatTemplate
from core.weights import find_folder, fingerprint_of_weights
from tasks.illustrated import IllustratedTemplate
from tasks.images import load_processor_of_text_and_images

RECORDS = ("run.json", "run_public.json")  # of a run; the second is what push.py publishes of it
MAIN = "main"  # the revision of a model on the hub that is taken if none is named


@dataclass(frozen=True)
class Source:
    """Where a model is: a folder or a hub id, and the base of the adapters that are in it.

    Attributes:
        name: as the command line or a run names it.
        base: None for a whole model.
        revision: branch, tag or commit of the whole model, if that is on the hub.
        run: for the base of a run, this run. It is asked with the run's tokenizer, chat template
            and settings, so that the prompts are the same before and after the training.
    """

    name: str
    base: str | None = None
    revision: str = MAIN
    run: "Source | None" = None

    @property
    def weights(self) -> str:
        """Return the folder or hub id of the whole model."""
        return self.base or self.name

    @property
    def tokenizer(self) -> str:
        """Return the folder or hub id of the tokenizer, which adapters may lack."""
        folder = (self.run or self).name
        has_tokenizer = Path(folder, "tokenizer_config.json").is_file()
        return folder if has_tokenizer else self.weights

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the run; {} without its record."""
        return read_run((self.run or self).name).get("arguments", {})

    @property
    def settings(self) -> dict[str, Any]:
        """Return the variables of the chat template that the run set."""
        return self.arguments.get("chat_template_kwargs") or {}

    @property
    def reads_images(self) -> bool:
        """Return whether there is what makes tensors of images, beside the tokenizer."""
        folder = find_folder(self.tokenizer, self.revision)
        names = ("processor_config.json", "preprocessor_config.json")
        return folder is not None and any((folder / name).is_file() for name in names)

    def template(self) -> ChatTemplate:
        """Return the tokenizer with its chat template. Raises SystemExit with 65 without one."""
        tokenizer = load_tokenizer(self)
        if not self.reads_images:
            return ChatTemplate(tokenizer, self.settings)
        with loading(self.tokenizer):
            processor = load_processor_of_text_and_images(self.tokenizer, revision=self.revision)
        return IllustratedTemplate(tokenizer, self.settings, processor)


# ---- What is in a folder ----
def find_source(name: str) -> Source:
    """Return the source of the model in a folder, or of a hub id.

    Raises SystemExit with 64 if there is no such folder, with 65 for adapters whose base is missing
    or has other weights than it had in training.
    """
    missing = find_missing(name)
    path = Path(name) / "adapter_config.json"
    if missing is None and Path(name).is_dir() and not any(Path(name).glob("*config.json")):
        missing = f"{name}: there is no config.json"
    if missing is not None:
        stop(Exit.USAGE, f"{missing}; give the --output_dir of a training run")
    if not path.is_file():
        return Source(name)
    config = json.loads(path.read_text(encoding="utf-8"))
    source = Source(name, config["base_model_name_or_path"], config.get("revision") or MAIN)
    if find_missing(source.weights) is not None:
        fix = f"put it back or correct {path}"
        stop(Exit.DATA, f"{name}: its base model {source.weights} is missing; {fix}")
    recorded = read_run(name).get("base_weights")
    found = fingerprint_of_weights(source.weights, source.revision)
    if recorded is not None and found not in (None, recorded):
        fix = f"put those back, or remove base_weights from {' or '.join(RECORDS)} in {name}"
        what = "are not those that the adapters were trained on"
        stop(Exit.DATA, f"the weights in {source.weights} {what}; {fix}")
    return source


def find_sources(names: Sequence[str], with_base: bool) -> list[Source]:
    """Return the models of the command line, each base before the first of its runs.

    A base that runs share is asked as the first of them. Raises SystemExit with 65 for one that no
    record names, or that is not here.
    """
    found: dict[str, Source] = {}
    for name in names:
        source = find_source(name)
        if with_base:
            base, revision = source.base, source.revision
            if base is None:
                base = source.arguments.get("model_name_or_path")
                revision = source.arguments.get("model_revision") or MAIN
            if base is None or find_missing(base) is not None:
                stop(Exit.DATA, f"--with_base: {name} records no base that is here: {base}")
            found.setdefault(base, Source(base, revision=revision, run=source))
        found[name] = source
    return list(found.values())


def read_run(name: str) -> dict[str, Any]:
    """Return the record of the run that wrote a folder; {} without one."""
    for record in RECORDS:
        path = Path(name, record)
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    return {}


# ---- Loading ----
def be_quiet() -> None:
    """Have the libraries print no progress and no warnings: the commands say what is wrong."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextlib.contextmanager
def loading(name: str) -> Generator[None]:
    """End with one line, and 65, or 69 for a hub id, if something of a model cannot be loaded."""
    try:
        yield
    except Exception as error:  # transformers, peft and torch raise what they like
        code = Exit.DATA if Path(name).exists() else Exit.NO_HUB
        reason = " ".join(str(error).split())[:400]
        stop(code, f"{name}: cannot be loaded: {reason or type(error).__name__}")


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
    with loading(name):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, padding_side="left", revision=source.revision, trust_remote_code=False
        )
    if needs_template and not tokenizer.chat_template:
        fix = "recipes/llama.py saves one with the model"
        stop(Exit.DATA, f"{name}: its tokenizer has no chat template; {fix}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: Source, args: Any) -> Any:
    """Return the model in evaluation mode, as the command line wants it.

    Args:
        args: dtype, device and load_in_4bit.
    """
    model = load_base(source, args)
    if source.base is not None:
        model = add_adapters(model, source)
    return model.eval()


def load_base(source: Source, args: Any) -> Any:
    """Return the same without its adapters."""
    quantization = None
    if args.load_in_4bit:
        # Of the products; the weights have 4 bits
        dtype = "bfloat16" if args.dtype == "auto" else args.dtype
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return load_weights(source, args.dtype, args.device or default_device(), quantization)


def load_weights(
    source: Source, dtype: Any, device: str, quantization: BitsAndBytesConfig | None
) -> Any:
    """Return the whole model of a source, without its adapters. Raises SystemExit with 65 or 69."""
    with loading(source.weights):
        model, report = auto_class_of(source).from_pretrained(
            source.weights,
            dtype=dtype,
            device_map=device,
            revision=source.revision,
            trust_remote_code=False,
            quantization_config=quantization,
            output_loading_info=True,
        )
    if lacking := report["missing_keys"]:  # The head of a reward model is another one
        stop(Exit.DATA, f"{source.weights}: has no {min(lacking)}: it is no causal language model")
    return model


def auto_class_of(source: Source) -> Any:
    """Return the class of transformers that loads the whole model of a source."""
    if source.reads_images:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def add_adapters(model: Any, source: Source, adapter_name: str = "default") -> PeftModel:
    """Return a model with the adapters of a source; those that it already has remain.

    Args:
        model: the base of the source or, with other adapters on the same base, a model of peft.
        adapter_name: of the new adapters in the model of peft, without a dot.
    """
    with loading(source.name):
        if isinstance(model, PeftModel):
            model.load_adapter(source.name, adapter_name)
            return model
        return PeftModel.from_pretrained(model, source.name, adapter_name)
