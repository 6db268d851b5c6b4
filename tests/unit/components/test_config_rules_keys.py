# SPDX-License-Identifier: Apache-2.0
"""Every misspelling of every key is refused, and the right name is suggested."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import yaml

from accelerate_judge import (
    deepspeed_run,
    fsdp_run,
    launched,
)
from broken_configs import DDP, DEEPSPEED_JSON, FSDP2, FULL2, ZERO
from components import accelerate_keys as keys
from components import config_rules
from components.accelerate_keys import full_name
from components.config_findings import rename
from components.config_rules_deepspeed_json import names_in_json
from launching import CONFIGS

pytestmark = pytest.mark.usefixtures("pretended_gpu")
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
PREFIXES = (
    "fsdp_",
    "parallelism_config_",
    "zero3_",
    "offload_",
    "num_",
    "mixed_",
    "distributed_",
    "zero_",
)


def misspellings(key: str) -> set[str]:
    """Every slip of one finger, hyphens for underscores, a missing and a wrong prefix."""
    places = range(len(key))
    slips = {key[:i] + key[i + 1 :] for i in places}
    slips |= {key[:i] + key[i] + key[i:] for i in places}
    slips |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in places[:-1]}
    slips |= {key[:i] + "x" + key[i + 1 :] for i in places}
    slips |= {key.replace("_", "-"), key.upper(), key.replace("_", "")}
    for prefix in PREFIXES:
        if key.startswith(prefix):
            rest = key.removeprefix(prefix)
            slips |= {rest, f"deepspeed_{rest}", f"accelerate_{key}"}
    return slips - {key, *keys.SECTIONS}


def paths_of(content: dict, path: tuple = ()) -> Iterator[tuple]:
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*path, key))


def renamed(content: dict, path: tuple, key: str) -> dict:
    """The content with one key, at a path, under another name in its place."""
    result = {}
    for name, value in content.items():
        if (name,) == path:
            result[key] = value
        elif name == path[0] and isinstance(value, dict) and path[1:]:
            result[name] = renamed(value, path[1:], key)
        else:
            result[name] = value
    return result


@dataclass
class Count:
    """How many misspellings were tried, and for how many the right key was proposed."""

    total: int = 0
    right: int = 0


def try_all_misspellings(paths: Iterable[tuple], content: dict, check, count: Count) -> None:
    """All are refused, except those that accelerate completes itself."""
    for path in paths:
        for slip in misspellings(path[-1]):
            wrong = (*path[:-1], slip)
            findings = check(renamed(content, path, slip))
            found = [item for item in findings if item.path == wrong]
            if path[1:] and full_name(path[0], slip) == path[-1]:
                assert [item.severity for item in found] == ["info"]
                assert found[0].fix == path[-1]
                continue
            assert "error" in [item.severity for item in findings], (path, slip)
            count.total += 1
            fix = rename(wrong, path[-1])
            count.right += any(fix in item.edits for item in found)


def test_every_misspelling_of_every_key_of_every_shipped_file_is_refused_and_put_right():
    count = Count()
    tried = set()  # (what trains, version of FSDP, key): files share keys, judged by the same rules
    for file in SHIPPED:
        content = yaml.safe_load(file.read_text())
        version = content.get("fsdp_config", {}).get("fsdp_version")
        own = {(content["distributed_type"], version, path) for path in paths_of(content)} - tried
        tried |= own
        paths = sorted(path for _, _, path in own)
        try_all_misspellings(paths, content, lambda content: config_rules.check(content)[0], count)
    share = count.right / count.total
    print(f"{count.total:,} misspellings, all refused, {share:.1%} put right")
    assert share >= 0.95


def test_every_misspelling_in_a_deepspeed_json_is_refused_and_put_right():
    count = Count()
    paths = paths_of(DEEPSPEED_JSON)
    try_all_misspellings(paths, DEEPSPEED_JSON, lambda data: list(names_in_json(data)), count)
    share = count.right / count.total
    print(f"{count.total:,} misspellings, all refused, {share:.1%} put right")
    assert share >= 0.95


def test_accelerate_says_nothing_to_unknown_keys(tmp_path):
    misspelt = FULL2 + "  fsdp_reshard_after_forwrd: false\n"
    assert fsdp_run(tmp_path, misspelt) == fsdp_run(tmp_path, FULL2)
    assert deepspeed_run(tmp_path, ZERO + "  zero_stge: 3\n")["zero_optimization"]["stage"] == 2


def test_accelerate_completes_names_in_three_sections(tmp_path):
    assert len(keys.ADDED_PREFIXES) == 3
    incomplete = FSDP2 + "  reshard_after_forward: false\n"
    assert fsdp_run(tmp_path, incomplete)["reshard_after_forward"] == "False"
    text = DDP + "dynamo_config:\n  mode: max-autotune\nfp8_config:\n  margin: 3\n"
    args = launched(tmp_path, text).args
    assert (args.dynamo_mode, args.fp8_margin) == ("max-autotune", 3)
    args = launched(tmp_path, FULL2 + "parallelism_config:\n  dp_shard_size: 8\n").args
    assert args.parallelism_config_dp_shard_size == 1
