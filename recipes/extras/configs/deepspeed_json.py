# SPDX-License-Identifier: Apache-2.0
"""What in a DeepSpeed JSON has no effect, or stops: DeepSpeed's own reader is asked."""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic
import yaml

from core.config_names import OWNED_BY_FLAGS, Fault, read_keys
from extras.configs.config import Found, at_keys

# {key: the recipes' flag that owns it}
OWNED = OWNED_BY_FLAGS | {"optimizer": "--optim", "scheduler": "--lr_scheduler_type"}


class Watched(dict):
    """A mapping that remembers which keys DeepSpeed asked it for."""

    def __init__(self, content: dict) -> None:
        super().__init__(content)
        self.asked: set[object] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key: object, default: Any = None) -> Any:
        """Return a value, or the default."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the mapping itself, since DeepSpeed asks `key in config.keys()`."""
        return self

    def __deepcopy__(self, memo: dict) -> "Watched":
        return self


def check_json(file: str, for_recipes: bool = True) -> Iterator[Fault]:
    """Yield what is wrong with a DeepSpeed JSON. Raises ValueError if it cannot be read."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        yield Fault(file, None, "deepspeed_config_file", str(error), "its path")
        return
    content = json.loads(text)
    keys = {}
    with suppress(yaml.YAMLError):  # JSON with tabs is not YAML, and gets no lines
        keys = {".".join(key.path): key for key in read_keys(text)}
    found = [*keys_that_are_refused(content), *rules_of_json(content)]
    yield from at_keys(found, file, keys, for_recipes)


def keys_that_are_refused(content: dict) -> Iterator[Found]:
    """Yield what DeepSpeed ignores at the top level, and what it stops at in a section."""
    from deepspeed.runtime.config import DeepSpeedConfig  # it takes seconds, and few name a JSON

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for key, value in without_autos(content).items():
        if key in (*OWNED, "sequence_parallel_size"):
            continue
        # One by one, since an error does not say which section it is about
        watched = Watched({"train_micro_batch_size_per_gpu": 1, key: value})
        try:
            DeepSpeedConfig(watched)
        except pydantic.ValidationError as error:
            for problem in error.errors():
                path = ".".join(map(str, (key, *problem["loc"])))
                yield "error", path, f"DeepSpeed stops: {problem['msg']}", "see its documentation"
        except Exception as error:  # of any kind, since its reader assumes that it is a mapping
            yield "error", key, f"DeepSpeed stops: {error}", "see its documentation"
        else:
            if key not in watched.asked:
                yield "error", key, "DeepSpeed has no such key, and ignores it", "delete it"


def without_autos(section: dict) -> dict:
    """Return a section without the values "auto", which accelerate fills in."""
    filled = {}
    for key, value in section.items():
        if isinstance(value, dict):
            filled[key] = without_autos(value)
        elif value != "auto":
            filled[key] = value
    return filled


def rules_of_json(content: dict) -> Iterator[Found]:
    """Yield what is otherwise in force than it is written, and what the recipes take elsewhere."""
    enabled = [(content.get(kind) or {}).get("enabled") for kind in ("bf16", "fp16")]
    if "auto" in enabled and True not in enabled:
        reason = "auto is fp32 without --mixed_precision of accelerate launch, or Trainer"
        yield "warning", f"{'bf16' if enabled[0] == 'auto' else 'fp16'}.enabled", reason, "true"
    for name, flag in OWNED.items():
        if content.get(name, "auto") != "auto":
            yield "recipes", name, f"the recipes take it from {flag}", "auto, or delete it"
    zero = content.get("zero_optimization")
    if not isinstance(zero, dict):
        yield "error", "zero_optimization", "missing: accelerate needs it", '{"stage": 0 to 3}'
        return
    stage = zero.get("stage", 0)
    if stage in ("0", "1", "2", "3"):
        reason = f"text: DeepSpeed runs ZeRO-{stage}, but accelerate does not know that"
        yield "error", "zero_optimization.stage", reason, f"{stage} without quotes"
        return
    for what, first in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(what) or {}).get("device", "none")
        if device not in ("none", "auto") and stage in range(first):
            reason = f"ZeRO-{stage} does not offload this"
            yield "error", f"zero_optimization.{what}.device", reason, f"stage {first}"
    gathers = "stage3_gather_16bit_weights_on_model_save"
    is_gathered = zero.get(gathers, zero.get(gathers.removeprefix("stage3_")))
    if stage == 3 and is_gathered not in (True, "true"):
        reason = "accelerator.get_state_dict fails at the end, after the training"
        yield "warning", f"zero_optimization.{gathers}", reason, "true"
    if stage in (1, 2) and zero.get("round_robin_gradients"):
        reason = "DeepSpeed looks for weights in their old order, and checkpoints are wrong"
        yield "recipes", "zero_optimization.round_robin_gradients", reason, "delete it"
