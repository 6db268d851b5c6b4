# SPDX-License-Identifier: Apache-2.0
"""Which known key an unknown one means: the same name with a slip, or a former name.

A likeness of letters is not enough: `comment` is no `comet`, and `stage3_min_live_parameters` is
not `stage3_max_live_parameters`. Two names mean the same if their words do, one by one.
"""

from collections.abc import Iterable
from functools import cache
from itertools import pairwise

from components.yaml_text import KeyPath

# {dimension of accelerate's mesh: the names of its size elsewhere: in torchtitan, Megatron, vLLM,
# axolotl and DeepSpeed}
SIZES_OF_MESH = {
    "dp_replicate": (
        "dp_replicate",
        "dp_replicate_size",
        "dp_replicate_degree",
        "data_parallel_replicate_size",
        "data_parallel_replicate_degree",
    ),
    "dp_shard": (
        "dp_shard",
        "dp_shard_size",
        "dp_shard_degree",
        "data_parallel_shard_size",
        "data_parallel_shard_degree",
    ),
    "tp": (
        "tp",
        "tp_size",
        "tp_degree",
        "tensor_parallel_size",
        "tensor_parallel_degree",
        "tensor_model_parallel_size",
    ),
    "cp": ("cp", "cp_size", "cp_degree", "context_parallel_size", "context_parallel_degree"),
    "sp": ("sp", "sp_size", "sequence_parallel_size", "ulysses_sequence_parallel_size"),
}
NAMES_OF_MESH = {
    name: f"parallelism_config_{kind}_size"
    for kind, names in SIZES_OF_MESH.items()
    for name in names
}
# Sizes that accelerate's mesh does not have: {name elsewhere: the flag of the recipe that has it}
OUTSIDE_OF_MESH = {
    name: f"--{kind}_size of {recipe}"
    for kind, word, recipe in (
        ("pp", "pipeline", "recipes/llama_pipeline.py"),
        ("ep", "expert", "recipes/mixtral.py"),
    )
    for name in (
        f"{kind}_size",
        f"{kind}_degree",
        f"{word}_parallel_size",
        f"{word}_parallel_degree",
        f"{word}_model_parallel_size",
    )
}
# {section: {name in public files: the key that means the same}}
FORMER_NAMES: dict[KeyPath, dict[str, str]] = {
    (): {
        "deepspeed": "deepspeed_config",
        "dynamo": "dynamo_config",
        "fp8": "fp8_config",
        "fsdp": "fsdp_config",
        "parallelism": "parallelism_config",
    },
    ("parallelism_config",): NAMES_OF_MESH,
    ("fsdp_config",): {
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_cpu_offload": "fsdp_offload_params",
        "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    },
    ("deepspeed_config",): {
        "offload_optimizer": "offload_optimizer_device",
        "offload_param": "offload_param_device",
        "stage": "zero_stage",
        "stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
        "zero3_save_fp16_model": "zero3_save_16bit_model",
        "zero_optimization_stage": "zero_stage",
    },
    ("zero_optimization",): {
        "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save",
    },
}
# Words that are used for one another in names
SAME_WORDS = {
    "algorithm": "algo",
    "checkpoint": "checkpointing",
    "checkpoints": "checkpointing",
    "class": "cls",
    "length": "len",
    "optim": "optimizer",
    "parameter": "params",
    "parameters": "params",
    "param": "params",
}
# Libraries and engines whose names people put before a key
OWNERS = ("accelerate", "deepspeed", "ds", "fsdp", "zero")
# Two words with fewer letters may be different words: tp and dp.
LETTERS_OF_A_SLIP = 3
LETTERS_OF_TWO_SLIPS = 9


def is_comment(key: object) -> bool:
    """Return whether a key only holds a remark, as in JSON, which has no comments."""
    return str(key).lower().startswith(("_", "#", "//", "comment"))


@cache
def meant_in(section: KeyPath, key: str, known: tuple[str, ...], prefix: str = "") -> str | None:
    """Return the only known name of a section that means the same as a key, or None.

    Args:
        section: the path of the section.
        key: the unknown key.
        known: the names that the section has.
        prefix: which names of the section have in common, and a key may lack.
    """
    former = FORMER_NAMES.get(section, {})
    wanted = normalized(key)
    for name in (wanted, prefix + wanted, wanted.removeprefix(prefix)):
        if former.get(name) in known:
            return former[name]
    short = {name.removeprefix(prefix): name for name in known}
    for name in (wanted, without_owner(wanted)):
        if name in known:
            return name
        if name in short:
            return short[name]
    candidates = {name for name in known if same_meaning(wanted, name)}
    candidates |= {short[name] for name in short if same_meaning(wanted, name)}
    if len(candidates) == 1:
        return candidates.pop()
    return None


def without_owner(name: str) -> str:
    """Return a name without the name of the library that it begins with, if it does."""
    first, _, rest = name.partition("_")
    return rest if first in OWNERS else name


def normalized(key: str) -> str:
    """Return a key in lower case, with underscores between its words."""
    return key.lower().replace("-", "_").replace(" ", "_")


def same_meaning(name: str, other: str) -> bool:
    """Return whether two names are the same but for slips of the finger or words for the same."""
    if numbers(name) != numbers(other):
        return False
    if name.replace("_", "") == other.replace("_", ""):
        return True
    words = name.split("_")
    other_words = other.split("_")
    if len(words) != len(other_words):
        return is_slip_of_the_whole(name, other)
    return all(map(same_word, words, other_words))


def numbers(name: str) -> list[str]:
    """Return the digits of a name, which are never slips: zero2 is not zero3, nor fp16 fp8."""
    return [letter for letter in name if letter.isdigit()]


def is_slip_of_the_whole(name: str, other: str) -> bool:
    """Return whether two names only differ by an underscore that is wrong or lacks."""
    joined = name.replace("_", "")
    other_joined = other.replace("_", "")
    return "_" in other and joined != other_joined and is_slip(name, other, slips=1)


def same_word(word: str, other: str) -> bool:
    """Return whether two words are the same but for a slip, or are used for one another."""
    if SAME_WORDS.get(word, word) == SAME_WORDS.get(other, other):
        return True
    if is_plural(word, other) or is_plural(other, word):
        return True
    if max(len(word), len(other)) < LETTERS_OF_A_SLIP:
        return False
    shorter = min(len(word), len(other))
    return is_slip(word, other, slips=2 if shorter >= LETTERS_OF_TWO_SLIPS else 1)


def is_plural(word: str, other: str) -> bool:
    """Return whether a word is the plural of the other."""
    return len(other) >= LETTERS_OF_A_SLIP and word in (f"{other}s", f"{other}es")


def is_slip(word: str, other: str, slips: int) -> bool:
    """Return whether one word becomes the other by so many changes of one letter at most.

    A change is a letter too many, too few, or wrong, or two neighbors swapped.
    """
    if abs(len(word) - len(other)) > slips:
        return False
    return distance(word, other) <= slips


def distance(word: str, other: str) -> int:
    """Return the optimal string alignment distance of two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for place, letter in enumerate(word, start=1):
        above = row
        row = [place]
        for column, other_letter in enumerate(other, start=1):
            changed = above[column - 1] + (letter != other_letter)
            row.append(min(above[column] + 1, row[column - 1] + 1, changed))
            swapped = word[place - 2 : place] == other[column - 2 : column][::-1]
            if place > 1 and column > 1 and swapped:
                row[column] = min(row[column], before[column - 2] + 1)
        before = above
    return row[-1]


def common_prefix(names: Iterable[str]) -> str:
    """Return the words that all names begin with."""
    words = [name.split("_") for name in names]
    if not words:
        return ""
    shared: list[str] = []
    for column in zip(*words, strict=False):
        if any(left != right for left, right in pairwise(column)):
            break
        shared.append(column[0])
    return "".join(f"{word}_" for word in shared)
