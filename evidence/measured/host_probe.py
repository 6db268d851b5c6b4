# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: how its host memory grows when it loads a model and when it resumes."""

import json
import threading
import time
from pathlib import Path
from typing import Any

# The recipe imports datasets, and with it pandas, only once it has made its Accelerator. Imported
# here, it does not count: it takes about 45 MB, which do not belong to the model.
import datasets  # noqa: F401
from accelerate import Accelerator
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rehearsal.step_hooks import when_prepared

SAMPLE_SECONDS = 0.002


def memory(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Phase:
    """The growth of this process's memory between two places in the recipe."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak of resident memory (man proc_pid_clear_refs)
        self.private = memory("RssAnon")
        self.most_private = self.private
        self.resident = memory("VmRSS")
        self.running = True
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self) -> None:
        """Record the peak of private memory until the phase ends."""
        while self.running:
            self.most_private = max(self.most_private, memory("RssAnon"))
            time.sleep(SAMPLE_SECONDS)

    def end(self) -> dict[str, int]:
        """Stop the sampling; return the bytes by which the two kinds of memory grew at most."""
        self.running = False
        self.thread.join()
        self.most_private = max(self.most_private, memory("RssAnon"))
        return {
            "private": self.most_private - self.private,
            "resident": memory("VmHWM") - self.resident,
        }


class Probe:
    """Measures from the Accelerator to `prepare`, and from there to the first forward pass."""

    phase: Phase
    hook: RemovableHandle  # on the forward pass

    def __init__(self, path: Path) -> None:
        self.path = path
        self.growth: dict[str, dict[str, int]] = {}

    def begin_to_load(self) -> None:
        """Called once the Accelerator is made."""
        self.phase = Phase()

    def end_loading(self, prepared: tuple[Any, ...]) -> None:
        """Called with the objects to prepare: once a model is among them, it has been loaded."""
        has_model = any(isinstance(item, Module) for item in prepared)
        if has_model and "loading" not in self.growth:
            self.growth["loading"] = self.phase.end()

    def begin_to_resume(self, model: Module, *_: Any) -> None:
        """Called once the model is prepared, before a checkpoint is read."""
        self.phase = Phase()
        self.hook = model.register_forward_pre_hook(self.end_resuming)

    def end_resuming(self, *_: Any) -> None:
        """Called before the first forward pass."""
        self.hook.remove()
        self.growth["resuming"] = self.phase.end()
        self.path.write_text(json.dumps(self.growth))


def track(path: Path) -> None:
    """Make this rank write {"loading": growth, "resuming": growth} to `path`, as JSON.

    Call it before the recipe starts: it hooks into the Accelerator that the recipe makes.
    """
    probe = Probe(path)
    make = Accelerator.__init__
    prepare = Accelerator.prepare

    def make_and_begin(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        probe.begin_to_load()

    def end_and_prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        probe.end_loading(args)
        return prepare(self, *args, **kwargs)

    Accelerator.__init__ = make_and_begin
    Accelerator.prepare = end_and_prepare
    when_prepared(probe.begin_to_resume)
