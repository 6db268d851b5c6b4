# SPDX-License-Identifier: Apache-2.0
"""What accelerate makes of a config: defaults filled in, full names, values as it reads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class OptionInSection:
    """An option of the launcher that a section of another topic sets.

    Attributes:
        path: where it is written.
        home: where it belongs; () if no key of a file is for it.
        value: the value as written.
    """

    path: KeyPath
    home: KeyPath
    value: Any


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


def home_of(key: Any) -> KeyPath | None:
    """Return where an option of the launcher belongs in a file; None if there is no such option.

    An option that no key of a file is for has the home ().
    """
    if key in keys.TOP_LEVEL and key not in keys.NO_OPTIONS and key != "dynamo_backend":
        return (key,)
    for section, known in keys.SECTIONS.items():
        if key in known:
            return section, key
    return () if key in keys.ONLY_OPTIONS else None


def options_in_sections(content: dict) -> Iterator[OptionInSection]:
    """Yield the options of the launcher that sections of other topics set, the last one last."""
    for section in keys.SECTIONS_IN_ORDER_OF_READING:
        if section not in keys.OPEN_SECTIONS:
            continue
        for key, value in written_in(content, section).items():
            home = home_of(key)
            if key not in keys.SECTIONS[section] and home is not None:
                yield OptionInSection((section, key), home, value)


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
    for option in options_in_sections(content):
        if option.home and option.value is not None:
            kind = kind_of(option.home)
            put_as_read(config, KnownSetting(option.home, option.value, kind))
    # The launcher only distinguishes between one and several
    config["num_machines"] = max(config["num_machines"], 1)
    # Nothing after the colon, or an unquoted NO, which is false in YAML
    if content.get("distributed_type", True) in (None, False):
        config["distributed_type"] = "NO"
    if deepspeed is not None:
        config["deepspeed_config"] |= zero_of_json(deepspeed)
        config["mixed_precision"] = precision_of_json(deepspeed)
    return config


def kind_of(path: KeyPath) -> Kind:
    """Return the kind of a known key at the top level or in a section."""
    if len(path) == 1:
        return keys.TOP_LEVEL[path[0]]
    section, key = path
    return keys.SECTIONS[section][key]


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
    for key, former in deepspeed_keys.FORMER_SWITCHES.items():
        if is_true(json_value(deepspeed, f"zero_optimization.{former}")):
            settings[key] = "cpu"
    return settings


def precision_of_json(deepspeed: dict) -> str:
    """Return the mixed precision of a DeepSpeed JSON; "auto" counts as "no"."""
    for kind in ("fp16", "bf16"):
        if is_true(json_value(deepspeed, f"{kind}.enabled")):
            return kind
    return "no"


def is_true(value: Any) -> bool:
    """Return whether DeepSpeed reads a value as true: pydantic also takes words and 1."""
    return keys.TRUTHS.get(str(value).lower(), False)


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
    def uses_torchrun(self) -> bool:
        """Whether torchrun starts the processes, as under all engines for several GPUs."""
        return self.engine not in (*keys.WITHOUT_TORCHRUN, "XLA")

    @property
    def has_json(self) -> bool:
        """Whether the file points to a DeepSpeed JSON; accelerate reads the word none as no."""
        return self.zero_written.get("deepspeed_config_file") not in (None, "none")

    @cached_property
    def options_in_sections(self) -> tuple[OptionInSection, ...]:
        """The options of the launcher that sections of other topics set."""
        return tuple(options_in_sections(self.written))

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
        """fsdp_config as written, but with full names, and with its keys in other sections."""
        return written_in(self.written, "fsdp_config") | self.elsewhere("fsdp_config")

    def elsewhere(self, section: str) -> dict:
        """Return the keys of a section that are written in other sections, where they work."""
        return {
            option.home[1]: option.value
            for option in self.options_in_sections
            if option.home[:1] == (section,) and len(option.home) == 2
        }

    @property
    def zero(self) -> dict:
        """deepspeed_config as accelerate reads it."""
        return self.read["deepspeed_config"]

    @property
    def zero_written(self) -> dict:
        """deepspeed_config as written."""
        return written_in(self.written, "deepspeed_config")

    def is_read(self, path: KeyPath) -> bool:
        """Return whether the launcher of this engine, or what it starts, reads a known key.

        A value that cannot be read stops only where it is read.
        """
        if self.engine is None:
            return True
        if len(path) == 1:
            return self.is_top_level_read(path[0])
        section, key = path
        if section in keys.SECTION_OF_ENGINE.values():
            own = keys.SECTION_OF_ENGINE.get(self.engine)
            return section == own and self.is_setting_of_engine_read(key)
        if section == "fp8_config":
            return self.read["mixed_precision"] == "fp8"
        if section == "dynamo_config":
            backend = self.read.get(section, {}).get("dynamo_backend", "NO")
            is_used = key != "dynamo_mode" or backend != "NO"
            return is_used and self.compiles and "dynamo_backend" not in self.written
        if section == "mpirun_config":
            return self.engine in keys.WITHOUT_TORCHRUN
        return self.uses_torchrun and self.is_setting_of_mesh_read(key)

    @property
    def compiles(self) -> bool:
        """Whether the launcher passes dynamo's settings on; those of DeepSpeed and TPUs do not."""
        return self.engine not in ("DEEPSPEED", "XLA")

    def is_top_level_read(self, key: Any) -> bool:
        """Return whether a known key of the top level is read."""
        if key in keys.COMMAND_LINE_ONLY:
            return False
        if key in keys.FOR_TPUS:
            return self.engine == "XLA"
        on_several = self.machines > 1
        when = {
            "dynamo_backend": self.compiles,
            "machine_rank": on_several and self.uses_torchrun,
            "main_process_ip": on_several,
            "use_cpu": not self.uses_torchrun,
        }
        return when.get(key, True)

    def is_setting_of_mesh_read(self, key: str) -> bool:
        """Return whether a key of parallelism_config is read: most only if rows are split."""
        mesh = self.read.get("parallelism_config", {})
        if key.endswith(("_size", "_backend")):
            return True
        kind = "cp" if "_cp_" in key else "sp"
        return mesh.get(f"parallelism_config_{kind}_size", 1) > 1

    def is_setting_of_engine_read(self, key: str) -> bool:
        """Return whether the engine of the file reads a known key of its own section."""
        if key == "fsdp_min_num_params":
            return self.fsdp["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
        if key == "fsdp_transformer_layer_cls_to_wrap":
            return self.fsdp["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        if key == "fsdp_backward_prefetch":
            return True  # FSDP2 drops it only after it has read it
        if key in keys.READ_BY_ONE_VERSION:
            return keys.READ_BY_ONE_VERSION[key] == self.fsdp_version
        if key in keys.FOR_SEVERAL_MACHINES:
            return self.machines > 1
        return True
