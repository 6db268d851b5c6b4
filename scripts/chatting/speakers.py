# SPDX-License-Identifier: Apache-2.0
"""The models that answer side by side. Adapters of one base share it, and so does the base itself.

The base of adapters answers with the adapters turned off, so that it is not loaded twice.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from peft import PeftModel

from generation.answering import Answerer
from generation.loading import add_adapters, find_sources, load_base


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


def load_speakers(args: argparse.Namespace) -> list[Speaker]:
    """Return the named models, and then the bases that they were trained on, each loaded once.

    Args:
        args: model_name_or_path and with_base; dtype, device and load_in_4bit of the weights;
            temperature and max_new_tokens of answers; chat_template_kwargs, before those of runs.
    """
    found = find_sources(args.model_name_or_path, args.with_base)
    sources = sorted(found, key=lambda source: source.run is not None)  # Bases come last
    templates = [source.template() for source in sources]
    models: dict[tuple[str, str], Any] = {}  # {a whole model: it, with the adapters of all}
    for number, source in enumerate(sources):
        whole = (source.weights, source.revision)
        if whole not in models:
            models[whole] = load_base(source, args).eval()
        if source.base is not None:
            # A path does not do as a name, since that has no dots
            models[whole] = add_adapters(models[whole], source, f"model_{number}").eval()
    lock = Lock()
    speakers = []
    for number, (source, template) in enumerate(zip(sources, templates, strict=True)):
        settings = {**template.settings, **args.chat_template_kwargs}
        template = replace(template, settings=settings)
        model = models[source.weights, source.revision]
        answerer = Answerer(model, template, args.temperature, args.max_new_tokens)
        adapter = None if source.base is None else f"model_{number}"
        name = source.name if source.run is None else f"{source.name} (before training)"
        speakers.append(Speaker(name, answerer, adapter, lock))
    return speakers
