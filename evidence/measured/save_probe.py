# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: how its host memory grows while it saves."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components import export, run, shards
from components.owners import SMALLEST_SHARE
from measured.host_probe import Phase


class Probe:
    """Measures each checkpoint, and the folder that `from_pretrained` loads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.growth: dict[str, int] = {}

    def measuring(self, name: str, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is measured."""

        @functools.wraps(save)
        def measured(*args: Any, **kwargs: Any) -> Any:
            phase = Phase()
            result = save(*args, **kwargs)
            grown = phase.end()["private"]
            self.growth[name] = max(grown, self.growth.get(name, 0))
            self.path.write_text(json.dumps(self.growth))
            return result

        return measured


def track(path: Path) -> None:
    """Make this rank write {"checkpoint": bytes, "folder": bytes} to `path`, as JSON.

    The bytes are those by which its private memory grew at most. Call it before the recipe starts:
    it replaces the functions that the recipe imports. The folder of a small model is spread over
    all ranks, as that of a large one is.

    A checkpoint is measured until it is whole. With --async_save the run waits for that here, so
    that neither training nor the next save is measured with it.
    """
    save_if_new = run.Run._save_if_new

    def save_and_finish(self: run.Run, *args: Any, **kwargs: Any) -> None:
        save_if_new(self, *args, **kwargs)
        self._finish_save()

    shards.SMALLEST_SHARE = SMALLEST_SHARE
    probe = Probe(path)
    run.Run._save_if_new = probe.measuring("checkpoint", save_and_finish)
    export.save_model = probe.measuring("folder", export.save_model)
