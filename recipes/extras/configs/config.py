# SPDX-License-Identifier: Apache-2.0
"""A config as the launcher of accelerate reads it: values by the names of its options."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import str_to_bool

from core.config_names import SECTIONS, Fault, Key, full_name

# The options that choose an engine, and the section that an engine reads
ENGINES = {
    "cpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "tpu": "XLA",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
}
SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
MESH_KINDS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


# What a rule finds: severity ("recipes" is an error for these recipes alone), name, reason, fix
Found = tuple[str, str, str, str]


@dataclass(frozen=True)
class Config:
    """The values of a config by name, as the launcher changes them; that of a section is a dict."""

    values: dict[str, Any]

    def text(self, name: str, default: str = "") -> str:
        """Return a value as text; the default also stands for an empty one."""
        value = self.values.get(name)
        return default if value is None else str(value)

    def number(self, name: str, default: int = 0) -> int:
        """Return a value as a number, or the default where it is none."""
        with suppress(ValueError):
            return int(self.text(name))
        return default

    def is_on(self, name: str, default: bool = False) -> bool:
        """Return a truth value, which may be a word."""
        with suppress(ValueError):
            return bool(str_to_bool(self.text(name, str(default))))
        return False

    def strategy(self, name: str) -> str:
        """Return a sharding strategy, which may be a name, a number from 1, or a truth value."""
        word = self.text(name, "FULL_SHARD").upper()
        if word in ("1", "2", "3", "4", "5"):
            return STRATEGIES[int(word) - 1]
        return {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(word, word)

    def size(self, kind: str) -> int:
        """Return a size of the mesh, as of "tp"."""
        return self.number(f"parallelism_config_{kind}_size", 1)

    @property
    def engine(self) -> str:
        """The distributed_type; an unquoted NO is false in YAML, and nothing means NO."""
        return str(self.values.get("distributed_type") or "NO")

    @property
    def fsdp(self) -> int:
        """The version of FSDP that runs; 0 under another engine."""
        return self.number("fsdp_version", 1) if self.engine == "FSDP" else 0

    @property
    def json(self) -> str | None:
        """The path of the DeepSpeed JSON, which stands for the keys of deepspeed_config."""
        name = self.text("deepspeed_config_file", "none")
        return name if name != "none" else None

    @property
    def machines(self) -> int:
        """The number of machines, from 1."""
        return max(self.number("num_machines", 1), 1)

    @property
    def places(self) -> int:
        """The number of processes in the mesh."""
        return prod(self.size(kind) for kind in MESH_KINDS)


def read_config(file: str, launch: Namespace | None = None) -> Config:
    """Return a config, as the options of a launch change it.

    Args:
        file: the YAML or JSON that the launcher reads.
        launch: as `core.config_names.find_launch` returns it.

    Raises OSError, ValueError, or yaml.YAMLError if it cannot be read as a mapping.
    """
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not an accelerate config: it has no keys")
    values = {str(name): value for name, value in content.items()}
    for section in SECTIONS:
        inner = content.get(section)
        if isinstance(inner, dict):
            values |= {full_name(section, str(key)): value for key, value in inner.items()}
    if launch is not None:
        values |= {name: getattr(launch, name) for name in launch.nondefault}
    for option, engine in ENGINES.items():
        if values.get(option):  # it also means that the sections of the others are not read
            values["distributed_type"] = engine
            values |= dict.fromkeys(set(SECTION_OF.values()) - {SECTION_OF.get(engine)})
    return Config(values)


def at_keys(
    found: Iterable[Found], file: str, keys: Mapping[str, Key], for_recipes: bool
) -> Iterator[Fault]:
    """Yield what is found in a file with its places.

    Args:
        found: by rules.
        file: its path.
        keys: {name: key that is written}.
        for_recipes: whether what only these recipes need counts as an error.
    """
    for severity, name, reason, fix in found:
        if severity == "recipes":
            severity = "error" if for_recipes else "info"
        if name in keys:
            dotted = ".".join(keys[name].path)
            yield Fault(file, keys[name].line, dotted, reason, fix, severity)
        else:
            yield Fault(file, None, name, reason, fix, severity)
