"""What accelerate makes of a config, and the rules that a file is held against.

`scripts/check_config.py` checks any file by them, and each recipe the file that its launcher read
(`launcher.py`). Most rules are about accelerate and DeepSpeed and hold for anybody's file; the
others are wishes of these recipes only. The facts come from the files named in
`accelerate_keys.py`; the tests prove the important ones with accelerate's launcher and plugins.
"""

import json
import os.path
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import count

import yaml

import accelerate_keys as keys

STOPS, IGNORED, COSTS, ADVICE = (
    "stops",
    "ignored",
    "costs",
    "advice",
)  # what accelerate and DeepSpeed do
UNSAVED, RECIPE, UNTESTED = "unsaved", "recipe", "untested"  # what these recipes want
SEVERITY = {  # for anybody's file, and for one that these recipes are to run under
    STOPS: ("error", "error"),  # accelerate or DeepSpeed ends
    IGNORED: ("error", "error"),  # something else runs, and nothing says so
    UNSAVED: ("warning", "error"),  # accelerator.get_state_dict fails, by which the recipes save
    RECIPE: ("info", "error"),  # the recipes refuse it, or go wrong with it
    COSTS: ("warning", "warning"),  # works, but costs or surprises
    UNTESTED: ("info", "warning"),  # nobody has tried the recipes with it
    ADVICE: ("info", "info"),
}
WISHES = (RECIPE, UNTESTED)  # which say nothing about somebody else's script
SHARDING_KEY = {
    1: "fsdp_sharding_strategy",
    2: "fsdp_reshard_after_forward",
}  # the one that each FSDP version reads
YAML_KEYS = {
    (): (*keys.TOP_LEVEL, *keys.SECTIONS),
    **{(name,): tuple(known) for name, known in keys.SECTIONS.items()},
}
SECTION_NAMES = {(): tuple(keys.SECTIONS)}
SUGGESTIONS = 100  # unknown keys of a file that a right name is sought for
OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}  # from which ZeRO stage on
OWNED = "the recipes take it from their command line: {}"
LOST_SAVE = "without it accelerator.get_state_dict fails at the final save, after the training"
# All that PyYAML raises
UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
OTHER_WORDS = {
    "ddp": "MULTI_GPU",
    "tpu": "XLA",
    "zero": "DEEPSPEED",
    "fp32": "no",
    "float32": "no",
    "bfloat16": "bf16",
    "float16": "fp16",
    "gpu": "none",
    "cuda": "none",
}  # that people write for a value


@dataclass
class Finding:
    """What is wrong at one key, why, and what to write instead; without edits (yaml_edits.py) a person must choose."""

    kind: str
    path: tuple
    reason: str
    fix: str
    edits: tuple = ()
    in_json: bool = False  # the DeepSpeed JSON that the file points to
    recipes: bool = False  # whether the file is for these recipes

    @property
    def severity(self):
        """error, warning or info."""
        for_anybody, for_recipes = SEVERITY[self.kind]
        return for_recipes if self.recipes else for_anybody


def worst_first(findings):
    """Sort findings: errors, warnings, advice, and the graver kind first among equals."""
    severities, kinds = ("error", "warning", "info"), list(SEVERITY)

    def place(item):
        return severities.index(item.severity), kinds.index(item.kind)

    return sorted(findings, key=place)


def finding(kind, path, reason, fix=""):
    """A Finding from a dotted path or a tuple, and a fix in words or as a list of edits, which then give the words."""
    path = split(path)
    if isinstance(fix, str):
        return Finding(kind, path, reason, fix)
    words = {}
    for action, (*section, key), *new in fix:
        name = new[0] if action == "rename" else key
        value = f": {scalar(new[0])}" if action == "set" else ""
        place = f" in {'.'.join(section)}" if section and section[0] != path[0] else ""
        words[name] = f"delete {name}" if action == "delete" else f"{name}{value}{place}"
    return Finding(kind, path, reason, ", ".join(words.values()), tuple(fix))


def split(path):
    return tuple(path.split(".")) if isinstance(path, str) else tuple(path)


def put(path, value):
    return "set", split(path), value


def drop(path):
    return "delete", split(path)


def rename(path, key):
    return "rename", split(path), key


def scalar(value):
    """A value as YAML text, in quotes only where it would be read as something else."""
    with suppress(*UNREADABLE):
        if isinstance(value, str) and yaml.safe_load(value) == value:
            return value
    return json.dumps(value, default=str, skipkeys=True)


# ---- Reading as accelerate does ----
def read_value(key, value, kind):
    """`value` as accelerate reads it: a bool, number, text, choice or strategy. Raises ValueError if it cannot."""
    word = str(value).lower()
    if kind == keys.STRATEGY and word in keys.TRUTHS:  # as FSDP2 says it
        return "FULL_SHARD" if keys.TRUTHS[word] else "SHARD_GRAD_OP"
    if kind == keys.STRATEGY and word in ("2", "3", "4", "5"):
        return keys.STRATEGIES[int(word) - 1]
    if kind == keys.BOOL and word in keys.TRUTHS:
        return keys.TRUTHS[word]
    if kind == keys.INT and not isinstance(value, bool):
        return int(str(value))
    if (
        kind == keys.TEXT
        and not isinstance(value, list)
        and (key != "gpu_ids" or isinstance(value, str))
    ):
        return value
    if kind in (keys.LIST, None):
        return value
    for choice in choices_of(kind):
        if (
            str(value) == str(choice)
            or word == str(choice).lower()
            and key not in keys.CASE_MATTERS
        ):
            return choice
    raise ValueError


def choices_of(kind):
    """The values that a kind of key takes, () if they are without number."""
    if isinstance(kind, tuple):
        return kind
    return {keys.STRATEGY: keys.STRATEGIES, keys.BOOL: (True, False)}.get(kind, ())


def full_name(section, key):
    """The key as the launcher knows it: in three sections it completes a key that lacks the prefix."""
    prefix = keys.ADDED_PREFIXES.get(section, "")
    return str(key) if str(key).startswith(prefix.removesuffix("_")) else f"{prefix}{key}"


def written_in(content, *path):
    """The section at a path as written, under full names; {} if there is none."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    section = path[0] if path else ""
    return (
        {full_name(section, key): value for key, value in content.items()}
        if isinstance(content, dict)
        else {}
    )


def known_values(content):
    """Yield (path, value, kind) of every known key, under its full name."""
    yield from (
        ((key,), value, keys.TOP_LEVEL[key])
        for key, value in content.items()
        if key in keys.TOP_LEVEL
    )
    for section, known in keys.SECTIONS.items():
        written = written_in(content, section)
        yield from (
            ((section, key), value, known[key]) for key, value in written.items() if key in known
        )


def as_read(content, deepspeed=None):
    """The config that accelerate makes of a file: defaults filled in, full names, real values.

    What accelerate ignores or cannot read is left out. Settings of a DeepSpeed JSON stand under their YAML names.
    """
    config = json.loads(json.dumps(keys.DEFAULTS))
    for (*section, key), value, kind in known_values(content):
        try:
            if value is not None:
                (config.setdefault(section[0], {}) if section else config)[key] = read_value(
                    key, value, kind
                )
        except ValueError:
            pass
    config["num_machines"] = max(
        config["num_machines"], 1
    )  # the launcher asks whether there are several
    if content.get("distributed_type", True) in (None, False):  # empty, or a bare NO
        config["distributed_type"] = "NO"
    if deepspeed is not None:
        for key, (auto, missing) in keys.READ_FROM_JSON.items():
            value = json_value(deepspeed, keys.REFUSED_BESIDE_A_FILE[key], auto, missing)
            known = value in keys.SECTIONS["deepspeed_config"][key]
            config["deepspeed_config"][key] = value if known else missing
        on = [kind for kind in ("fp16", "bf16") if json_value(deepspeed, f"{kind}.enabled") is True]
        config["mixed_precision"] = on[0] if on else "no"
    return config


def json_value(data, path, auto="auto", missing=None):
    """The value at a dotted path of a DeepSpeed JSON, or what stands for "auto" and for no value."""
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return missing if data is None else auto if data == "auto" else data


def strategy_of(config):
    """What an accelerate YAML asks for: engine, strategy or stage, mesh, and the offload keys that are on."""
    fsdp, zero = config.get("fsdp_config") or {}, config.get("deepspeed_config") or {}
    mesh = config.get("parallelism_config") or {}
    engine = {"FSDP": f"fsdp{fsdp.get('fsdp_version', 1)}", "DEEPSPEED": "zero"}.get(
        config["distributed_type"]
    )
    if engine is None:
        engine = "ddp" if str(config["distributed_type"]).startswith("MULTI") else "single"
    return {
        "engine": engine,
        "strategy": fsdp.get("fsdp_sharding_strategy", "FULL_SHARD") if engine == "fsdp1" else None,
        "stage": zero.get("zero_stage", 2) if engine == "zero" else None,
        "replicas": mesh.get("parallelism_config_dp_replicate_size", 1),
        "shards": mesh.get("parallelism_config_dp_shard_size", 0),
        "offload": [
            key
            for key, value in {**fsdp, **zero}.items()
            if "offload" in key and "activation" not in key and value in (True, "cpu")
        ],
    }


def mesh_sizes(config):
    """Sizes of the mesh in parallelism_config, 1 where nothing is written."""
    mesh, kinds = (
        config.get("parallelism_config", {}),
        ("dp_replicate", "dp_shard", "tp", "cp", "sp"),
    )
    return {kind: mesh.get(f"parallelism_config_{kind}_size", 1) for kind in kinds}


def strategy_run(config):
    """The strategy in force, in FSDP1's words; ZeRO-1 and ZeRO-2 have none there."""
    facts = strategy_of(config)
    if facts["engine"] == "fsdp2":
        strategy = config["fsdp_config"][SHARDING_KEY[2]]
        hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
        return (
            hybrid.get(strategy, strategy) if mesh_sizes(config)["dp_replicate"] > 1 else strategy
        )
    return facts["strategy"] or ("NO_SHARD", "ZeRO-1", "ZeRO-2", "FULL_SHARD")[facts["stage"] or 0]


# ---- Names and values ----
@cache
def nearest(section, key, sections, likeness=0.6):
    """The (section, name) that an unknown key most likely means, or (None, None), out of (section, names) pairs."""
    wanted = key.lower().replace("-", "_").replace(" ", "_")
    own_first = sorted(sections, key=lambda pair: pair[0] != section)
    for home, names in own_first:
        if wanted in names:
            return home, wanted
    for home, names in own_first:
        prefix = os.path.commonprefix(names)
        short = {name.removeprefix(prefix): name for name in names}
        close = get_close_matches(
            wanted, [*names, *short], 1, likeness if home == section else 0.75
        )
        if close:
            return home, short.get(close[0], close[0])
    return None, None


def unknown_key(path, value, content, sections, kind, reason, engine=None):
    """The finding on a key that nothing reads where it stands, with the nearest right one unless that is written."""
    *section, key = path
    if key in keys.OWNED_BY_THE_RECIPE:
        place = ("deepspeed_config", key)
        if engine == "DEEPSPEED" and key in keys.SECTIONS[place[0]] and place != tuple(path):
            if key in written_in(content, place[0]):
                return finding(
                    kind, path, f"{reason}; {'.'.join(place)} is written too", [drop(path)]
                )
            edits = [drop(path), put(place, value)]
            return finding(kind, path, f"{reason}; its place is {place[0]}", edits)
        reason = f"{reason}; {OWNED.format(keys.OWNED_BY_THE_RECIPE[key])}"
        return finding(kind, path, reason, [drop(path)])
    if path in keys.REMOVED:
        new = keys.REMOVED[path]
        reason += "; older versions knew this one"
        return finding(kind, path, reason, f"{new}, or delete it" if new else [drop(path)])
    likeness = (
        0.85 if sections is SECTION_NAMES else 0.6
    )  # their common ending alone makes them alike
    home, name = nearest(tuple(section), str(key), tuple(sections.items()), likeness)
    if name is None:
        single = sections and not isinstance(value, dict)
        return finding(
            kind, path, reason, [drop(path)] if single else "delete it, or its right name"
        )
    if home != tuple(section):
        reason += f"; its place is {'.'.join(home) or 'the top level'}"
        if (
            home[:1]
            and home[0] in keys.SECTION_OF.values()
            and home[0] != keys.SECTION_OF.get(engine)
        ):
            return finding(kind, path, f"{reason}, which {engine} does not read", [drop(path)])
    if name in written_in(content, *home):
        reason += f"; {name} is written too"
        if name != key:  # misspelt
            return finding(kind, path, reason, f"delete it, or {name}")
        if written_in(content, *home)[name] == value:
            return finding(kind, path, reason, [drop(path)])
        return finding(kind, path, reason, "delete one of the two")
    if home == tuple(section):
        return finding(kind, path, reason, [rename(path, name)])
    return finding(kind, path, reason, [drop(path), put((*home, name), value)])


def check_names(content, config):
    """Keys that are misspelt, misplaced, incomplete, or the recipes' own."""
    engine, sought = config.get("distributed_type"), count()
    for key, value in content.items():
        if key not in keys.TOP_LEVEL and key not in keys.SECTIONS:
            names = SECTION_NAMES if isinstance(value, dict) else YAML_KEYS
            reason, names = (
                "accelerate refuses unknown keys here",
                names if next(sought) < SUGGESTIONS else {},
            )
            yield unknown_key((key,), value, content, names, STOPS, reason, engine)
        elif key in keys.SECTIONS and not isinstance(value, dict | None):
            yield finding(STOPS, (key,), "is a section", "keys below it, indented")
    for section in (name for name in keys.SECTIONS if isinstance(content.get(name), dict)):
        for key, value in content[section].items():
            full = full_name(section, key)
            if full not in keys.SECTIONS[section]:
                reason, names = (
                    "no such key: accelerate says nothing",
                    YAML_KEYS if next(sought) < SUGGESTIONS else {},
                )
                yield unknown_key((section, key), value, content, names, IGNORED, reason, engine)
            elif full != key and full in content[section]:
                reason = f"{full} is written too: the last one counts"
                yield finding(IGNORED, (section, key), reason, "one of them")
            elif full != key:
                path = (section, key)
                yield finding(
                    COSTS, path, "only the launcher completes this name", [rename(path, full)]
                )


def check_values(content, config):
    """Values that accelerate cannot read."""
    for path, value, kind in known_values(content):
        key = path[-1]
        if value is None and (
            len(path) == 1 or path[0] == "deepspeed_config" or key in keys.MAY_BE_EMPTY
        ):
            continue
        try:
            number = read_value(key, value, kind)
        except ValueError:
            said_as = keys.BOOL if is_read_as_bool(key, config) else kind
            yield unreadable(path, value, said_as, "num_processes" in content)
        else:
            if kind == keys.INT and isinstance(value, str):
                yield finding(
                    COSTS, path, "text, where some readers want a number", [put(path, number)]
                )


def is_readable(key, value, kind):
    """Whether accelerate can read a value."""
    try:
        read_value(key, value, kind)
    except ValueError:
        return False
    return True


def is_read_as_bool(key, config):
    """Whether a key that either version of FSDP has in its own words is true or false for the file's version."""
    return key == "fsdp_reshard_after_forward" and config["fsdp_config"]["fsdp_version"] == 2


def unreadable(path, value, kind, has_processes):
    """The finding on a value of the wrong kind, with the value that was most likely meant."""
    if kind == keys.TEXT:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return finding(STOPS, path, f"{scalar(value)} is not text", [put(path, text)])
    choices = {str(choice).lower(): choice for choice in choices_of(kind)}
    if value is False and "no" in choices:
        works = path == ("distributed_type",) and has_processes
        return finding(
            COSTS if works else STOPS,
            path,
            "a bare no is false in YAML",
            [put(path, choices["no"])],
        )
    word = str(value).lower()
    close = [OTHER_WORDS[word]] if word in OTHER_WORDS else get_close_matches(word, choices, 1)
    meant = choices.get(close[0].lower()) if close else None
    wanted = f"one of {', '.join(map(str, choices.values()))}" if choices else kind
    reason = f"{'empty' if value is None else scalar(value)}: must be {wanted}"
    return finding(STOPS, path, reason, wanted if meant is None else [put(path, meant)])


# ---- Engine, processes, mesh, precision ----
def check_engine(content, config):
    """The engine against the sections of the file, of which it reads one at most."""
    engine, path = config.get("distributed_type"), "distributed_type"
    others = {
        kind: section
        for kind, section in keys.SECTION_OF.items()
        if kind != engine and content.get(section)
    }
    fix = [put(path, *others)] if len(others) == 1 else "one of FSDP, DEEPSPEED, MULTI_GPU, NO"
    if path not in content:
        yield finding(STOPS, path, "missing", fix)
    elif content[path] is None:
        yield finding(IGNORED, path, "empty: one process runs", fix)
    elif engine and others and content.get(keys.SECTION_OF.get(engine)):
        for section in others.values():
            yield finding(IGNORED, section, f"{engine} runs and does not read it", [drop(section)])
    elif engine and others:
        yield finding(
            IGNORED, path, f"{engine} runs and does not read {' or '.join(others.values())}", fix
        )
    elif engine == "NO" and config.get("num_processes", 1) > 1:
        yield finding(
            IGNORED,
            path,
            f"one process runs, not {config['num_processes']}",
            [put(path, "MULTI_GPU")],
        )
    elif engine in ("XLA", "MEGATRON_LM", "MULTI_CPU"):
        yield finding(UNTESTED, path, f"the recipes are not tested under {engine}", fix)


def check_processes(content, config):
    """Processes, machines, their addresses and GPUs, and what the launcher does not take from the file."""
    engine, ranks, machines = (
        config.get("distributed_type"),
        config.get("num_processes", -1),
        config["num_machines"],
    )
    written = content.get("num_machines")
    if type(written) is int and written < 1:
        yield finding(
            COSTS, "num_machines", f"{written}: one machine runs", [put("num_machines", 1)]
        )
    if ranks == -1 and engine not in ("NO", None) and "num_processes" not in content:
        yield finding(
            COSTS,
            "num_processes",
            "missing: the launcher wants --num_processes",
            "a number, or the flag",
        )
    elif ranks != -1 and ranks // machines < 1:
        yield finding(
            STOPS,
            "num_processes",
            f"{ranks} processes on {machines} machines",
            "at least one on each",
        )
    elif ranks % machines and ranks != -1:
        reason = f"{machines} machines start {ranks // machines} each: {ranks // machines * machines} run"
        yield finding(IGNORED, "num_processes", reason, "a multiple of num_machines")
    if not 0 <= config["machine_rank"] < machines:
        yield finding(
            STOPS, "machine_rank", "the machines would wait for one another", f"0 to {machines - 1}"
        )
    least = 2 if machines == 1 and str(engine).startswith("MULTI") else 1
    ids, needed = config["gpu_ids"], max(ranks // machines, least)
    if ids != "all" and engine not in ("MULTI_CPU", "XLA") and len(ids.split(",")) < needed:
        yield finding(
            STOPS,
            "gpu_ids",
            f"{needed} processes on a machine need as many GPUs",
            "more of them, or all",
        )
    address = ("main_process_ip", "main_process_port")[
        : 2 if engine in ("NO", "MULTI_CPU") else 1
    ]  # else port 29500
    if machines > 1 and not all(config.get(key) for key in address):
        yield finding(
            COSTS, "num_machines", "no address to meet at", f"{' and '.join(address)}, or the flags"
        )
    launcher = config["deepspeed_config"]["deepspeed_multinode_launcher"]
    hosts = launcher == "standard" or config["deepspeed_config"].get("deepspeed_hostfile")
    if machines > 1 and engine == "DEEPSPEED" and not hosts:
        yield finding(
            IGNORED,
            "num_machines",
            "without a deepspeed_hostfile DeepSpeed trains on this machine alone",
            "deepspeed_multinode_launcher: standard and a launch on each machine, or a deepspeed_hostfile",
        )
    for key, idle in keys.COMMAND_LINE_ONLY.items():
        if (
            idle is not None
            and config.get(key, idle) != idle
            and (machines > 1 or key != "rdzv_backend")
        ):
            yield finding(
                COSTS,
                key,
                "accelerate launch never takes it from the file",
                f"the flag --{key} instead",
            )


def check_mesh(content, config):
    """parallelism_config against the engine and the number of processes."""
    if not content.get("parallelism_config"):
        return
    path, engine, sizes = "parallelism_config", config.get("distributed_type"), mesh_sizes(config)
    version, ranks, product = (
        config["fsdp_config"]["fsdp_version"],
        config.get("num_processes", -1),
        1,
    )
    for kind, size in sizes.items():
        product *= size
        if size < 1:
            yield finding(STOPS, f"{path}.{path}_{kind}_size", "a group has members", "1 or more")
        if size > 1 and kind in ("tp", "cp", "sp"):
            yield finding(
                RECIPE, f"{path}.{path}_{kind}_size", "the recipes shard and replicate alone", "1"
            )
    if engine == "FSDP" and version == 1:
        yield finding(
            STOPS, path, "FSDP1 takes no mesh", "fsdp_version: 2, or HYBRID_SHARD without a mesh"
        )
    elif engine == "FSDP" and sizes["dp_shard"] == sizes["cp"] == 1:
        yield finding(
            STOPS,
            path,
            "FSDP2 has nothing to shard over",
            "a parallelism_config_dp_shard_size above 1",
        )
    elif engine == "FSDP" and ranks not in (-1, product):
        yield finding(
            STOPS,
            path,
            f"its sizes multiply to {product}, num_processes is {ranks}",
            "make them equal",
        )
    elif str(engine).startswith("MULTI") and sizes["dp_shard"] > 1:
        edits = [put("distributed_type", "FSDP"), put("fsdp_config.fsdp_version", 2)]
        yield finding(IGNORED, path, "DDP runs and shards nothing", edits)
    elif engine in ("NO", "DEEPSPEED") and product > 1 and sizes["sp"] == 1:
        yield finding(IGNORED, path, f"{engine} does not split by it", [drop(path)])


def check_precision(content, config):
    """Mixed precision, and its name in older versions."""
    if "fp16" in content and "mixed_precision" in content:
        yield finding(COSTS, "fp16", "an old name, not read beside mixed_precision", [drop("fp16")])
    elif "fp16" in content:
        new = put("mixed_precision", "fp16" if config.get("fp16") else "no")
        yield finding(COSTS, "fp16", "an old name", [rename("fp16", "mixed_precision"), new])
    if config["mixed_precision"] == "fp8":
        if "fp8_backend" not in config.get("fp8_config", {}):
            reason = "fp8 runs on the first installed of AO, TE and MSAMP"
            yield finding(COSTS, "mixed_precision", reason, "fp8_backend in fp8_config, or bf16")
        yield finding(UNTESTED, "mixed_precision", "the recipes are not tested in fp8", "bf16")


# ---- FSDP ----
def check_fsdp(content, config):
    """fsdp_config: what one version reads and the other does not, and what cannot stand together."""
    if config.get("distributed_type") != "FSDP":
        return
    written, fsdp, at = written_in(content, "fsdp_config"), config["fsdp_config"], "fsdp_config."
    version, path = fsdp["fsdp_version"], at + "fsdp_version"
    if "fsdp_version" not in written and isinstance(written.get(SHARDING_KEY[2]), bool):
        yield finding(IGNORED, path, "missing: FSDP1 runs, FULL_SHARD", [put(path, 2)])
        return
    if "fsdp_version" not in written:
        yield finding(
            COSTS, path, "missing: FSDP1 runs; `accelerate config` writes 2", [put(path, 1)]
        )
    yield from check_sharding(written, config)
    whole, path = strategy_run(config) == "NO_SHARD", at + "fsdp_auto_wrap_policy"
    if not whole and str(written.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper() in (
        "NO_WRAP",
        "NONE",
    ):
        reason = "the model is one unit: each process gathers all of it at once"
        yield finding(COSTS, path, reason, [put(path, "TRANSFORMER_BASED_WRAP")])
    saves, path = fsdp.get("fsdp_state_dict_type"), at + "fsdp_state_dict_type"
    if whole and version == 1:
        reason = "deprecated in torch; ddp.yaml holds the same and takes adapters"
        yield finding(ADVICE, at + SHARDING_KEY[1], reason)
    if whole and saves == "SHARDED_STATE_DICT":
        yield finding(
            COSTS,
            path,
            "there are no shards: torch warns and falls back",
            [put(path, "FULL_STATE_DICT")],
        )
    if version == 2 and saves == "LOCAL_STATE_DICT":
        yield finding(STOPS, path, "FSDP2 has none", [put(path, "SHARDED_STATE_DICT")])
    if version == 2 and fsdp.get("fsdp_forward_prefetch"):
        path = at + "fsdp_forward_prefetch"
        yield finding(COSTS, path, "FSDP2 does not read it: nothing is prefetched so", [drop(path)])
    sync, ram, again = (
        "fsdp_sync_module_states",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_activation_checkpointing",
    )
    if written.get(sync) is False and fsdp[ram]:
        edit = put(at + sync, True) if ram in written else put(at + ram, False)
        reason = f"the launcher refuses it while {ram} is true, its default"
        yield finding(STOPS, at + sync, reason, [drop(at + sync) if version == 2 else edit])
    if version == 1 and fsdp.get("fsdp_use_orig_params") is False:
        reason = "an optimizer made before prepare keeps the parameters that FSDP1 replaces: nothing is trained"
        yield finding(
            RECIPE, at + "fsdp_use_orig_params", reason, [put(at + "fsdp_use_orig_params", True)]
        )
    if fsdp.get(again + "_offload") and (version == 1 or not fsdp.get(again)):
        yield finding(
            STOPS,
            f"{at}{again}_offload",
            f"needs FSDP2 and {again}",
            f"fsdp_version: 2 and {again}: true",
        )
    if fsdp.get(again):
        yield finding(
            ADVICE,
            at + again,
            "not together with a script's own (the recipes' --gradient_checkpointing)",
        )


def check_sharding(written, config):
    """The two sharding keys: accelerate exports both, each version of FSDP reads one."""
    fsdp, runs, version = (
        config["fsdp_config"],
        strategy_run(config),
        config["fsdp_config"]["fsdp_version"],
    )
    read, unread = SHARDING_KEY[version], SHARDING_KEY[3 - version]
    word, none = str(written.get(read)).lower(), "; FSDP2 has none, DDP holds the same"
    if not is_readable(read, written.get(read, True), keys.STRATEGY):
        return  # check_values says so
    if (
        read in written
        and (word in keys.TRUTHS if version == 1 else word not in keys.TRUTHS)
        and word != "1"
    ):
        reason = f"{written[read]} is how FSDP{3 - version} says it" + none * (
            fsdp[read] == "NO_SHARD"
        )
        yield finding(STOPS, f"fsdp_config.{read}", reason, in_version(config, read))
    elif unread in written and read in written and fsdp[unread] not in (runs, fsdp[read]):
        reason = f"FSDP{version} does not read it: {runs} runs, not {fsdp[unread]}"
        yield finding(IGNORED, f"fsdp_config.{unread}", reason, f"delete it, or change {read}")
    elif unread in written and read not in written:
        same = fsdp[unread] in (
            runs,
            fsdp[read],
        )  # on a mesh FSDP2's FULL_SHARD runs as HYBRID_SHARD
        reason = f"FSDP{version} does not read it: {runs} runs" + (
            " anyway" if same else f", not {fsdp[unread]}"
        )
        reason += none * (version == 2 and fsdp[unread] == "NO_SHARD")
        yield finding(
            COSTS if same else IGNORED, f"fsdp_config.{unread}", reason, in_version(config, unread)
        )


def in_version(config, key):
    """Edits that say the strategy under `key` as the file's FSDP version reads it; words if a person must choose."""
    wanted, version = config["fsdp_config"][key], config["fsdp_config"]["fsdp_version"]
    right = SHARDING_KEY[version]
    if version == 2 and wanted == "NO_SHARD":  # FSDP2 has none; DDP holds the same
        return [put("distributed_type", "MULTI_GPU"), drop("fsdp_config")]
    if version == 2 and "HYBRID" in wanted and mesh_sizes(config)["dp_replicate"] == 1:
        return "a mesh in parallelism_config, as in fsdp2_hybrid_shard.yaml"
    value = wanted if version == 1 else wanted in ("FULL_SHARD", "HYBRID_SHARD")
    moved = [rename(f"fsdp_config.{key}", right)] if key != right else []
    return [*moved, put(f"fsdp_config.{right}", value)]


# ---- DeepSpeed ----
def check_deepspeed(content, config, deepspeed):
    """deepspeed_config, alone or beside a JSON."""
    written, zero, at = (
        written_in(content, "deepspeed_config"),
        config["deepspeed_config"],
        "deepspeed_config.",
    )
    if config.get("distributed_type") != "DEEPSPEED":
        return
    if "deepspeed_config_file" in written:
        if deepspeed is None:
            yield finding(
                STOPS, at + "deepspeed_config_file", "no JSON file of this name", "its path"
            )
        for key, place in keys.REFUSED_BESIDE_A_FILE.items():
            path = key if key == "mixed_precision" else at + key
            if (content if path == key else written).get(key) is not None:
                reason = "accelerate refuses it beside deepspeed_config_file"
                yield finding(STOPS, path, reason, f"delete it; in the JSON it is {place}")
        return
    for key, flag in keys.OWNED_BY_THE_RECIPE.items():
        if written.get(key, "auto") not in ("auto", None):
            yield finding(RECIPE, at + key, OWNED.format(flag), [drop(at + key)])
    stage, save, init = zero["zero_stage"], at + "zero3_save_16bit_model", at + "zero3_init_flag"
    if "zero_stage" not in written:
        yield finding(COSTS, at + "zero_stage", "missing: ZeRO-2 runs", [put(at + "zero_stage", 2)])
    for key, least in OFFLOADS.items():
        if zero[f"{key}_device"] != "none" and stage < least:
            reason = f"ZeRO-{stage} does not offload this"
            yield finding(
                IGNORED, f"{at}{key}_device", reason, f"zero_stage: {least}, or delete it"
            )
        if zero[f"{key}_device"] == "nvme":
            reason = f"the launcher drops {key}_nvme_path: DeepSpeed would swap to a folder ./none"
            yield finding(
                IGNORED, f"{at}{key}_device", reason, "a deepspeed_config_file that names the path"
            )
    if stage == 3 and not zero.get("zero3_save_16bit_model"):
        yield finding(UNSAVED, save, LOST_SAVE, [put(save, True)])
    if stage == 3 and zero.get("zero3_init_flag") is False:
        yield finding(
            COSTS,
            init,
            "each process first loads the whole model into host memory",
            [put(init, True)],
        )


def check_json(data):
    """A DeepSpeed JSON that accelerate is pointed to."""
    yield from check_json_names(data)
    if "zero_optimization" not in data:
        yield finding(
            STOPS, "zero_optimization", "missing: accelerate needs it", '{"stage": 0 to 3}'
        )
    for path in keys.DEEPSPEED_SECTIONS:
        *section, key = split(path)
        inner = written_in(data, *section).get(key, {})
        if not isinstance(inner, dict) and (inner is not None or path not in keys.MAY_BE_NULL):
            first = (*keys.DEEPSPEED_JSON.get(split(path), ()), "key")[0]
            fix = (
                [drop(path)]
                if path in keys.OWNED_BY_THE_RECIPE
                else f'{{"{first}": ...}}, or delete it'
            )
            yield finding(STOPS, path, "is a section", fix)
    for key, flag in keys.OWNED_BY_THE_RECIPE.items():
        if data.get(key, "auto") != "auto":
            edit = drop(key) if key in keys.DEEPSPEED_SECTIONS else put(key, "auto")
            yield finding(RECIPE, key, OWNED.format(flag), [edit])
    if "gradient_accumulation_steps" not in data:
        path = "gradient_accumulation_steps"
        yield finding(
            RECIPE,
            path,
            "missing: accelerate makes it 1, which the recipes refuse",
            [put(path, "auto")],
        )
    stage = as_read({}, data)["deepspeed_config"]["zero_stage"]
    for key in keys.READ_FROM_JSON:
        path, choices = keys.REFUSED_BESIDE_A_FILE[key], keys.SECTIONS["deepspeed_config"][key]
        if json_value(data, path, auto=None) not in (None, *choices):
            yield unreadable(split(path), json_value(data, path), choices, True)
    path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and json_value(data, path) is not True:
        yield finding(UNSAVED, path, f"{LOST_SAVE} (auto is false)", [put(path, True)])
    for key, least in OFFLOADS.items():
        path = f"zero_optimization.{key}.device"
        if stage < least and json_value(data, path, "none", "none") != "none":
            yield finding(
                IGNORED, path, f"ZeRO-{stage} does not offload this", f"stage {least}, or delete it"
            )
    on = {kind: json_value(data, f"{kind}.enabled") for kind in ("bf16", "fp16")}
    if list(on.values()) == [True, True]:
        yield finding(STOPS, "fp16.enabled", "bf16 and fp16 at once", "one of them")
    elif True not in on.values() and "auto" in on.values():
        path = "bf16.enabled" if on["bf16"] == "auto" else "fp16.enabled"
        yield finding(
            COSTS, path, "auto is fp32 here, unless --mixed_precision is passed", [put(path, True)]
        )
    for path in unfilled_autos(data):
        yield finding(STOPS, path, "accelerate has no value for this auto", [drop(path)])


def check_json_names(data):
    """Keys of a DeepSpeed JSON that DeepSpeed does not know."""
    sections, sought = (
        {section: tuple(known) for section, known in keys.DEEPSPEED_JSON.items()},
        count(),
    )
    for section, known in sections.items():
        inner = json_value(data, ".".join(section)) if section else data
        kind, then = (
            (STOPS, "stops once the model is loaded") if section else (IGNORED, "says nothing")
        )
        for key in inner if isinstance(inner, dict) else ():
            if key in keys.REMOVED_FROM_DEEPSPEED and not section:
                yield finding(STOPS, (key,), "removed from DeepSpeed", [drop((key,))])
            elif key not in known and f"stage3_{key}" not in known:
                names, reason = (
                    sections if next(sought) < SUGGESTIONS else {},
                    f"no such key: DeepSpeed {then}",
                )
                yield unknown_key((*section, key), inner[key], data, names, kind, reason)


def unfilled_autos(section, path=()):
    """Yield the paths of values "auto" that accelerate does not fill in; what the recipes own has its own rule."""
    for key, value in section.items():
        if isinstance(value, dict) and key not in keys.OWNED_BY_THE_RECIPE:
            yield from unfilled_autos(value, (*path, key))
        elif value == "auto" and ".".join((*path, key)) not in keys.FILLED_IN_JSON:
            yield (*path, key)


def check(content, deepspeed=None, recipes=False):
    """Hold a config, and the DeepSpeed JSON it points to, against all rules.

    Takes dicts, as written. recipes: whether the wishes of the recipes count too. Returns the
    findings, worst first, and the config as accelerate reads it.
    """
    config = as_read(content, deepspeed)
    found = list(check_deepspeed(content, config, deepspeed))
    for rule in (
        check_names,
        check_values,
        check_engine,
        check_processes,
        check_mesh,
        check_precision,
        check_fsdp,
    ):
        found += rule(content, config)
    if deepspeed is not None:
        found += [replace(item, in_json=True) for item in check_json(deepspeed)]
    return worst_first(replace(item, recipes=recipes) for item in found), config
