# SPDX-License-Identifier: Apache-2.0
"""What is asked side by side: trained folders, and the bases that they were trained from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.chat import ChatTemplate
from generation.answering import Answerer
from generation.loading import (
    Source,
    arguments_of_run,
    base_of,
    default_device,
    find_source,
    load_model,
    load_tokenizer,
    template_settings_of,
)


@dataclass(frozen=True)
class Contestant:
    """A model, and how it is asked.

    A base is asked as the run that began with it: with the tokenizer and the chat template of the
    run's folder, and its settings. So the prompts are the same before and after the training.

    Attributes:
        name: as the command line or the run names it.
        source: where the weights are.
        run: where the tokenizer is, and the run.json by which rows are read and rendered.
        before: the name of the base, for a run whose base is evaluated too.
    """

    name: str
    source: Source
    run: Source
    before: str | None = None

    @property
    def is_base(self) -> bool:
        """Return whether it is there as the base of a run."""
        return self.source is not self.run

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the run; {} without a run.json."""
        return arguments_of_run(self.run.name)

    def template(self) -> ChatTemplate:
        """Return the tokenizer with its chat template. Raises SystemExit with 65 without one."""
        return ChatTemplate(load_tokenizer(self.run), template_settings_of(self.run.name))

    def load(self, args: Any) -> torch.nn.Module:
        """Return the model, as the command line wants it."""
        device = args.device or default_device()
        return load_model(self.source, args.dtype, device, args.load_in_4bit)

    def answerer(self, model: torch.nn.Module, max_new_tokens: int) -> Answerer:
        """Return the loaded model as it is asked for its likeliest answers."""
        return Answerer(model, self.template(), 0, max_new_tokens)


def find_contestants(names: Sequence[str], with_base: bool) -> list[Contestant]:
    """Return the models of the command line, each base before the first of its runs.

    A base that runs share is asked as the first of them.

    Raises SystemExit with 64 or 65 for a folder that cannot be used.
    """
    found: dict[str, Contestant] = {}
    for name in names:
        source = find_source(name)
        before = None
        if with_base:
            base = base_of(source)
            before = base.name
            found.setdefault(before, Contestant(before, base, source))
        found[name] = Contestant(name, source, source, before)
    return list(found.values())
