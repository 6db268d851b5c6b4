# SPDX-License-Identifier: Apache-2.0
"""The models that answer side by side. Adapters of one base share it, and so does the base itself.

The base of adapters answers with the adapters turned off, so that it is not loaded twice.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

from peft import PeftModel

from chatting.conversation import History
from core.chat import ChatTemplate
from generation import loading
from generation.answering import Answerer, RunningAnswer
from generation.contestants import find_contestants
from generation.loading import Source


@dataclass(frozen=True)
class Speaker:
    """A model that answers.

    Attributes:
        name: as it is shown.
        adapter: the name of its adapters in a model of peft; None for the model without them.
        lock: held while any of the models answers.
    """

    name: str
    answerer: Answerer
    adapter: str | None
    lock: Lock

    @contextmanager
    def taking_turn(self) -> Iterator[None]:
        """Hold the lock, with the adapters of this model active."""
        model = self.answerer.model
        with self.lock:
            if not isinstance(model, PeftModel):
                yield
            elif self.adapter is None:
                with model.disable_adapter():
                    yield
            else:
                model.set_adapter(self.adapter, inference_mode=True)
                yield

    def answer(self, history: History, prompt: str, stopping: Event | None = None) -> RunningAnswer:
        """Start to answer a new prompt of a conversation, until an event is set."""
        return RunningAnswer(self.answerer, history.asking(prompt), self.taking_turn(), stopping)


def place_of(source: Source) -> str:
    """Return where the whole model is: the absolute path of a folder, or a hub id and revision."""
    path = Path(source.weights)
    return str(path.resolve()) if path.is_dir() else f"{source.weights}@{source.revision}"


def load_speakers(names: Sequence[str], with_base: bool, args: argparse.Namespace) -> list[Speaker]:
    """Return the named models, and then the bases that they were trained on, each loaded once.

    Args:
        with_base: whether the bases are wanted too.
        args: dtype, device and load_in_4bit of the weights; temperature and max_new_tokens of
            answers; chat_template_kwargs, before those of the run.
    """
    found = find_contestants(names, with_base)
    wanted = sorted(found, key=lambda model: model.is_base)  # Bases come last
    templates = [model.template() for model in wanted]
    device = args.device or loading.default_device()
    quantization = loading.nf4(args.dtype) if args.load_in_4bit else None
    models: dict[str, Any] = {}  # {place of a whole model: it, with the adapters of all}
    for number, model in enumerate(wanted):
        place = place_of(model.source)
        if place not in models:
            whole = loading.load_weights(model.source, args.dtype, device, quantization)
            models[place] = whole.eval()
        if model.source.base is not None:
            adapted = loading.add_adapters(models[place], model.source, adapter_name(number))
            models[place] = adapted.eval()
    lock = Lock()
    speakers = []
    for number, (model, template) in enumerate(zip(wanted, templates, strict=True)):
        settings = {**template.settings, **args.chat_template_kwargs}
        template = ChatTemplate(template.tokenizer, settings)
        loaded = models[place_of(model.source)]
        answerer = Answerer(loaded, template, args.temperature, args.max_new_tokens)
        adapter = None if model.source.base is None else adapter_name(number)
        name = f"{model.name} (before training)" if model.is_base else model.name
        speakers.append(Speaker(name, answerer, adapter, lock))
    return speakers


def adapter_name(number: int) -> str:
    """Return the name of a model's adapters; a path does not do, since names have no dots."""
    return f"model_{number}"
