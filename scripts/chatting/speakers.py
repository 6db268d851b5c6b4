# SPDX-License-Identifier: Apache-2.0
"""The models that answer side by side. Adapters of one base share it, and so does the base itself.

The base of adapters answers with the adapters turned off, so that it is not loaded twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

from peft import PeftModel

from chatting.history import History
from core.chat import ChatTemplate
from generation import loading
from generation.answering import Answerer, RunningAnswer
from generation.loading import Source


@dataclass(frozen=True)
class Wanted:
    """A model that was asked for.

    Attributes:
        name: as it is shown.
        source: where its weights are.
        prompts: where its tokenizer, its chat template and the settings of that are. For a base
            they are those of the run that began with it, since the run may have added a template.
    """

    name: str
    source: Source
    prompts: Source


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

    def answer(
        self, history: History, prompt: str, decoding: "Decoding", stopping: Event
    ) -> RunningAnswer:
        """Start to answer a new prompt of a conversation, until an event is set."""
        answerer = replace(
            self.answerer,
            temperature=decoding.temperature,
            max_new_tokens=decoding.max_new_tokens,
        )
        return RunningAnswer(answerer, history.asking(prompt), self.taking_turn(), stopping)


@dataclass
class Decoding:
    """How tokens are chosen.

    Attributes:
        temperature: 0 always takes the likeliest token.
        max_new_tokens: the length of the longest answer.
    """

    temperature: float
    max_new_tokens: int


# ---- Which models ----
def find_wanted(names: Sequence[str], with_base: bool) -> list[Wanted]:
    """Return the named models and, if requested, the bases that they were trained on.

    Raises SystemExit with 64 or 65 after a line about a folder that cannot be used.
    """
    wanted = []
    for name in names:
        source = loading.find_source(name)
        wanted.append(Wanted(name, source, source))
    if with_base:
        for model in list(wanted):
            base = loading.base_of(model.source)
            if not any(is_same(base, other.source) for other in wanted):
                wanted.append(Wanted(f"{base.name} (before training)", base, model.source))
    return wanted


def is_same(one: Source, other: Source) -> bool:
    """Return whether two sources are the same model."""
    if one.base is not None or other.base is not None:
        return one == other
    return place_of(one) == place_of(other)


def place_of(source: Source) -> str:
    """Return where the whole model is: the absolute path of a folder, or a hub id and revision."""
    path = Path(source.weights)
    return str(path.resolve()) if path.is_dir() else f"{source.weights}@{source.revision}"


# ---- Loading ----
@dataclass(frozen=True)
class LoadOptions:
    """How weights are loaded: arguments of `loading.load_model`."""

    dtype: str
    device: str
    load_in_4bit: bool


def load_speakers(
    wanted: Sequence[Wanted],
    options: LoadOptions,
    decoding: Decoding,
    settings: Mapping[str, Any],
) -> list[Speaker]:
    """Return the models, each base loaded once.

    Args:
        settings: variables of the chat template, before those of the run.
    """
    tokenizers = [loading.load_tokenizer(model.prompts) for model in wanted]
    models = load_bases(wanted, options)
    lock = Lock()
    speakers = []
    for number, model in enumerate(wanted):
        tokenizer = tokenizers[number]
        loaded = models[place_of(model.source)]
        of_run = loading.template_settings_of(model.prompts.name)
        template = ChatTemplate(tokenizer, {**of_run, **settings})
        answerer = Answerer(loaded, template, decoding.temperature, decoding.max_new_tokens)
        adapter = None if model.source.base is None else adapter_name(number)
        speakers.append(Speaker(model.name, answerer, adapter, lock))
    return speakers


def load_bases(wanted: Sequence[Wanted], options: LoadOptions) -> dict[str, Any]:
    """Return {place of a whole model: the model with the adapters of all who share it}."""
    models: dict[str, Any] = {}
    for number, model in enumerate(wanted):
        source = model.source
        place = place_of(source)
        if place not in models:
            models[place] = loading.load_weights(
                source, options.dtype, options.device, options.load_in_4bit
            )
        if source.base is not None:
            models[place] = loading.add_adapters(models[place], source, adapter_name(number))
    return {place: model.eval() for place, model in models.items()}


def adapter_name(number: int) -> str:
    """Return the name of a model's adapters; a path does not do, since names have no dots."""
    return f"model_{number}"
