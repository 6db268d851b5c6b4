# SPDX-License-Identifier: Apache-2.0
"""A trained folder, whole or of adapters, and the prompts that it is asked."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from exits import Exit, first_line, stop
from generation import loading
from generation.questions import columns_of_run
from generation.recorded import arguments_of_run, find_run
from merging import checking, prompts, receipt, trained
from merging.adapter import AdapterFolder, read_adapter_folder
from merging.contestants import Asking, Contestant, stop_tokens_of_recipe

BATCH_SIZE = 8  # prompts at a time


@dataclass(frozen=True)
class Origin:
    """A trained folder, read but for its weights.

    Attributes:
        adapter: None for a whole model.
        config: that of the whole model, or of the base of adapters.
        arguments: those of the run; {} without a run.json.
        sources: {where prompts come from: how many}.
        num_prompts: how many were requested.
    """

    source: loading.Source
    adapter: AdapterFolder | None
    config: Any
    tokenizer: Any
    arguments: Mapping[str, Any]
    asking: Asking
    sources: dict[str, int]
    device: str
    num_prompts: int

    @property
    def name(self) -> str:
        """Return the folder, as it was named."""
        return self.source.name

    def load(self) -> Any:
        """Return the model as it was trained. Raises SystemExit with 65 or 69."""
        if self.adapter is None:
            return loading.load_model(self.source, "auto", self.device)
        return trained.load_trained(self.adapter, self.device)

    def answer(self) -> Contestant:
        """Return what the model says as it was trained."""
        model = self.load()
        stop_tokens = stop_tokens_of_recipe(model, self.tokenizer)
        return self.asking.ask("trained", model, self.tokenizer, stop_tokens)


def read_origin(
    source: loading.Source,
    args: argparse.Namespace,
    reader: type[prompts.Reader] = prompts.Reader,
) -> Origin:
    """Return what a source names, read and checked but for the weights.

    Raises SystemExit with 64, 65 or 69.

    Args:
        args: prompts, num_prompts, max_new_tokens and device of the command line.
        reader: chooses among the rows.
    """
    adapter = None
    if source.base is not None:
        adapter = read_adapter_folder(source.name)
    config = read_config(source)
    tokenizer = checking.load_tokenizer(source.tokenizer, source.revision)
    folder = run_of(Path(source.name))
    arguments = arguments_of_run(folder)
    settings = dict(arguments.get("chat_template_kwargs") or {})
    template = Asking([], settings, 1, 1).template_of(tokenizer)
    longest = prompts.longest_prompt(config, args.max_new_tokens)
    rows = reader(tokenizer, template, columns_of_run(folder), longest)
    found = prompts.collect(rows, args.prompts, arguments, args.num_prompts)
    asking = Asking(found.items, settings, args.max_new_tokens, BATCH_SIZE)
    device = args.device or loading.default_device()
    return Origin(
        source,
        adapter,
        config,
        tokenizer,
        arguments,
        asking,
        found.sources,
        device,
        args.num_prompts,
    )


def run_of(folder: Path) -> Path:
    """Return the folder of the run that trained a model: the adapters of a merged one, if known.

    It says which rows the prompts are taken from, and sets the variables of the chat template.
    """
    try:
        merged = json.loads((folder / receipt.NAME).read_text(encoding="utf-8"))
        adapters = Path(merged["adapters"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder
    if find_run(folder).is_file() or not adapters.is_dir():
        return folder
    return adapters


def read_config(source: loading.Source) -> Any:
    """Return the config of a whole model, or of the base. Raises SystemExit with 65 or 69."""
    try:
        return AutoConfig.from_pretrained(
            source.weights, revision=source.revision, trust_remote_code=False
        )
    except loading.LOAD_ERRORS as error:
        code = Exit.DATA if source.is_local else Exit.NO_HUB
        stop(code, f"{source.weights}: its config.json cannot be used: {first_line(error)}")
