# SPDX-License-Identifier: Apache-2.0
"""What accelerate makes of a config: defaults filled in, full names, values as it reads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components import accelerate_keys as keys
from components import deepspeed_keys
from components.accelerate_keys import Kind, full_name
from components.yaml_text import KeyPath

# Stands for a file without num_processes: the command line of the launcher has to give it.
NOT_GIVEN = -1


@dataclass(frozen=True)
class KnownSetting:
    """A setting under a key that accelerate knows, by its full name."""

    path: KeyPath
    value: Any
    kind: Kind


def value_at(content: Any, path: KeyPath) -> Any:
    """Return the value at a path of nested mappings, or None if there is none."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def written_in(content: Any, *path: str) -> dict:
    """Return the section at a path as written, but with full names; {} if there is none."""
    section = value_at(content, path)
    if not isinstance(section, dict):
        return {}
    name = path[0] if path else ""
    return {full_name(name, key): value for key, value in section.items()}


def known_settings(content: dict) -> Iterator[KnownSetting]:
    """Yield all settings under known keys: first the top level, then section by section."""
    for key, value in content.items():
        if key in keys.TOP_LEVEL:
            yield KnownSetting((key,), value, keys.TOP_LEVEL[key])
    for section, known in keys.SECTIONS.items():
        for key, value in written_in(content, section).items():
            if key in known:
                yield KnownSetting((section, key), value, known[key])


def as_read(content: dict, deepspeed: dict | None = None) -> dict:
    """Return the config that accelerate makes of a file.

    What accelerate ignores or cannot read is left out.

    Args:
        content: content of the YAML.
        deepspeed: content of the DeepSpeed JSON that the YAML points to. Its settings are returned
            under their names in the YAML.
    """
    config: dict[str, Any] = dict(keys.TOP_LEVEL_DEFAULTS)
    config["fsdp_config"] = dict(keys.FSDP_DEFAULTS)
    config["deepspeed_config"] = dict(keys.DEEPSPEED_DEFAULTS)
    for setting in known_settings(content):
        if setting.value is not None:
            put_as_read(config, setting)
    # The launcher only distinguishes between one and several
    config["num_machines"] = max(config["num_machines"], 1)
    # Nothing after the colon, or an unquoted NO, which is false in YAML
    if content.get("distributed_type", True) in (None, False):
        config["distributed_type"] = "NO"
    if deepspeed is not None:
        config["deepspeed_config"] |= zero_of_json(deepspeed)
        config["mixed_precision"] = precision_of_json(deepspeed)
    return config


def put_as_read(config: dict, setting: KnownSetting) -> None:
    """Put a setting into a config if accelerate can read its value."""
    *sections, key = setting.path
    try:
        value = keys.read_value(key, setting.value, setting.kind)
    except ValueError:
        return
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def zero_of_json(deepspeed: dict) -> dict:
    """Return the ZeRO stage and the offload devices of a DeepSpeed JSON, by their YAML names."""
    settings = {}
    for key, missing in deepspeed_keys.WHEN_MISSING.items():
        auto = keys.DEEPSPEED_DEFAULTS[key]
        value = json_value(deepspeed, deepspeed_keys.IN_JSON[key], auto, missing)
        known = value in keys.DEEPSPEED[key]
        settings[key] = value if known else missing
    return settings


def precision_of_json(deepspeed: dict) -> str:
    """Return the mixed precision of a DeepSpeed JSON; "auto" counts as "no"."""
    for kind in ("fp16", "bf16"):
        if json_value(deepspeed, f"{kind}.enabled") is True:
            return kind
    return "no"


def json_value(data: Any, path: str, auto: Any = "auto", missing: Any = None) -> Any:
    """Return the value at a dotted path of a DeepSpeed JSON.

    Args:
        auto: what to return for the value "auto".
        missing: what to return if there is no value.
    """
    value = value_at(data, tuple(path.split(".")))
    if value is None:
        return missing
    if value == "auto":
        return auto
    return value


@dataclass(frozen=True)
class Config:
    """A config as the rules see it: as written, and as accelerate reads it.

    Attributes:
        written: content of the YAML.
        read: what accelerate makes of it.
        deepspeed: content of the DeepSpeed JSON that the YAML points to.
    """

    written: dict
    read: dict
    deepspeed: dict | None = None

    @classmethod
    def of(cls, written: dict, deepspeed: dict | None = None) -> "Config":
        """Return the Config of a YAML's content, and of the JSON that it points to."""
        return cls(written, as_read(written, deepspeed), deepspeed)

    @property
    def engine(self) -> str | None:
        """The distributed_type: FSDP, DEEPSPEED, MULTI_GPU, NO, ...; None if it is not known."""
        return self.read.get("distributed_type")

    @property
    def processes(self) -> int:
        """The number of processes, or NOT_GIVEN."""
        return self.read.get("num_processes", NOT_GIVEN)

    @property
    def machines(self) -> int:
        """The number of machines, 1 or more."""
        return self.read["num_machines"]

    @property
    def fsdp(self) -> dict:
        """fsdp_config as accelerate reads it."""
        return self.read["fsdp_config"]

    @property
    def fsdp_version(self) -> int:
        """The version of FSDP, 1 or 2."""
        return self.fsdp["fsdp_version"]

    @property
    def fsdp_written(self) -> dict:
        """fsdp_config as written, but with full names."""
        return written_in(self.written, "fsdp_config")

    @property
    def zero(self) -> dict:
        """deepspeed_config as accelerate reads it."""
        return self.read["deepspeed_config"]

    @property
    def zero_written(self) -> dict:
        """deepspeed_config as written."""
        return written_in(self.written, "deepspeed_config")
