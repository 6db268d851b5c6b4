# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: how its host memory grows while it loads, resumes and saves.

Loading is from the Accelerator to `prepare`, resuming from there to the first forward pass. A
checkpoint is measured until it is whole: with --async_save the run waits for that here, so that
neither training nor the next save is measured with it. The folder that `from_pretrained` loads is
collected on rank 0.
"""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These are imported only once there is an Accelerator, peft by transformers, when it loads a model.
# Imported here, they do not count: each takes about 45 MB, which do not belong to the model.
import datasets  # noqa: F401
import peft  # noqa: F401
from accelerate import Accelerator
from torch.nn import Module
from torch.optim import Optimizer

from core import export, run
from rehearsal.step_hooks import when_prepared
from rehearsal.whole_tensors import find_pipeline

SAMPLE_SECONDS = 0.002


def private_memory() -> int:
    """Return the bytes of memory that belong to this process alone."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Recorder:
    """Writes the growth of this process's private memory in each phase, the largest of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.growth: dict[str, int] = {}
        self.thread: threading.Thread | None = None  # samples while there is a phase

    def begin(self) -> None:
        """Begin a phase."""
        self.before = private_memory()
        self.most = self.before
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self) -> None:
        """Record the peak of private memory until the phase ends."""
        while not self.ends.wait(SAMPLE_SECONDS):
            self.most = max(self.most, private_memory())

    def end(self, name: str) -> None:
        """End the phase, if there is one."""
        if self.thread is not None:
            self.ends.set()
            self.thread.join()
            self.thread = None
            found = max(self.most, private_memory()) - self.before
            self.growth[name] = max(found, self.growth.get(name, 0))
            self.path.write_text(json.dumps(self.growth))

    def measured(self, name: str, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, as a phase of its own outside of others."""

        @functools.wraps(save)
        def call(*arguments: Any, **options: Any) -> Any:
            if self.thread is not None:
                return save(*arguments, **options)
            self.begin()
            result = save(*arguments, **options)
            self.end(name)
            return result

        return call


def track(path: Path) -> None:
    """Make this rank write {what it did: growth} to `path`. Call it before the recipe starts."""
    recorder = Recorder(path)
    make = Accelerator.__init__
    prepare = Accelerator.prepare
    save_if_new = run.Run._save_if_new

    def make_and_begin(self: Accelerator, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        recorder.begin()

    def end_and_prepare(self: Accelerator, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(item, Module | Optimizer) for item in arguments):
            recorder.end("loading")
        return prepare(self, *arguments, **options)

    def begin_to_resume(model: Module, *_: Any) -> None:
        if find_pipeline() is not None:  # It calls its stages and not the model
            return
        recorder.begin()

        def end_resuming(*_: Any) -> None:
            hook.remove()
            recorder.end("resuming")

        hook = model.register_forward_pre_hook(end_resuming)

    def save_and_finish(self: run.Run, *arguments: Any, **options: Any) -> None:
        save_if_new(self, *arguments, **options)
        self._finish_save()

    Accelerator.__init__ = make_and_begin
    Accelerator.prepare = end_and_prepare
    when_prepared(begin_to_resume)
    run.Run._save_if_new = recorder.measured("checkpoint", save_and_finish)
    export.save_model = recorder.measured("folder", export.save_model)
