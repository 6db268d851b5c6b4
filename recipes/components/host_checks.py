# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a run must have in common, from versions to the output folder.

Each host starts its ranks by itself, so that a host may have another environment, another command
line, another YAML or another disk. Clocks need not agree; if they are far apart, a line says so,
since logs of different hosts can then not be compared.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub import constants

from components.ending import end_all_ranks
from components.hosts import Host
from components.shared_folder import find_host_without
from components.status import HOST, process_status
from components.strategy import Strategy
from core.exits import Exit
from core.summary import LIBRARIES

SECONDS_APART = 5  # Clocks that are synchronized differ by less than one.
# Nothing is lost if a cache that is shared is not seen as such within these.
SECONDS_FOR_CACHE = 2
NAMED_DIFFERENCES = 5
STRATEGY = "the strategy"
MIXED_PRECISION = "mixed precision"


def check_hosts(accelerator: Accelerator, hosts: list[Host], args: Any) -> str:
    """End with 64 if the hosts of a run differ in what they must share. Every rank takes part.

    Args:
        hosts: all hosts of the run; nothing is checked if there are fewer than two.

    Returns:
        The summary's line about the hosts, or "" on one host.
    """
    if len(hosts) < 2:
        return ""
    problem = find_difference(gather_object([(HOST, facts_of_host(accelerator, args))]))
    if problem:
        end_all_ranks(accelerator, Exit.USAGE, problem)
    compare_clocks(accelerator)
    line = "; ".join(map(str, hosts))
    if args.dry_run:  # It writes nothing, not even a file for a moment.
        return line
    host = find_host_without(accelerator, Path(args.output_dir))
    if host:
        end_all_ranks(
            accelerator,
            Exit.USAGE,
            f"--output_dir {args.output_dir} is not the same folder on {host} as on "
            f"{hosts[0].name}: pass a folder on a file system that all hosts share (NFS, Lustre, "
            "...), by the same path on each, since ranks of all hosts write the checkpoints",
        )
    return f"{line}; {describe_cache(accelerator)}"


# ---- Versions, files and arguments ----
def facts_of_host(accelerator: Accelerator, args: Any) -> dict[str, str]:
    """Return what has to be the same on every host: {name: value as text}."""
    facts = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    facts |= hashes_of_recipe(Path(sys.argv[0]))
    facts[STRATEGY] = Strategy.of(accelerator).name
    facts[MIXED_PRECISION] = accelerator.mixed_precision
    for name, value in vars(args).items():
        if name != "output_dir":  # Hosts may reach the same folder by other paths.
            facts[f"--{name}"] = str(value)
    return facts


def hashes_of_recipe(recipe: Path) -> dict[str, str]:
    """Return the beginning of the SHA-256 of a recipe's file and of each module, by its name."""
    hashes = {}
    rooms = Path(__file__).parents[1]
    files = [file for room in ("core", "components") for file in (rooms / room).glob("*.py")]
    for file in (recipe, *sorted(files)):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        name = file.name if file == recipe else file.relative_to(rooms).as_posix()
        hashes[name] = f"of SHA-256 {digest[:8]}"
    return hashes


def find_difference(facts: list[tuple[str, Mapping[str, str]]]) -> str | None:
    """Return what differs between the first rank and another one, with the fix, or None.

    Args:
        facts: of each rank the name of its host, and what `facts_of_host` returned there.
    """
    first_host, first = facts[0]
    for host, other in facts[1:]:
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if not names:
            continue
        differences = []
        for name in names[:NAMED_DIFFERENCES]:
            here = first.get(name, "not there")
            there = other.get(name, "not there")
            differences.append(f"{name} is {here} on {first_host} and {there} on {host}")
        if len(names) > NAMED_DIFFERENCES:
            differences.append(f"{len(names) - NAMED_DIFFERENCES} more differ")
        return f"{'; '.join(differences)}: {fix_of_difference(names[0])}"
    return None


def fix_of_difference(name: str) -> str:
    """Return what makes a fact the same on all hosts."""
    if name.startswith("--"):
        return "run the same command on all hosts"
    if name in (STRATEGY, MIXED_PRECISION):
        return "launch all hosts with the same --config_file"
    if name.endswith(".py"):
        return "copy the same recipes to all hosts"
    return "install the same versions on all hosts"


# ---- Clocks ----
def compare_clocks(accelerator: Accelerator) -> None:
    """Warn if the clocks of two hosts are far apart. Every rank takes part."""
    accelerator.wait_for_everyone()  # Now all ranks read their clocks within a moment.
    clocks = gather_object([(time.time(), HOST, process_status().began)])
    # From here on a report counts, whichever clock it is dated by. What an earlier run has left is
    # gone: rank 0 has replaced it.
    process_status().began = min(began for _, _, began in clocks)
    slowest = min(clocks)
    fastest = max(clocks)
    apart = fastest[0] - slowest[0]
    if apart > SECONDS_APART and accelerator.is_main_process:
        print(
            f"warning: the clock of {fastest[1]} is {apart:.0f} s ahead of that of {slowest[1]}: "
            "times in their logs cannot be compared; synchronize them (NTP, chrony)",
            file=sys.stderr,
            flush=True,
        )


# ---- The cache ----
def describe_cache(accelerator: Accelerator) -> str:
    """Return whether the hosts share the cache of models and rows. Every rank takes part."""
    cache = Path(constants.HF_HOME)
    host, problem = broadcast_object_list([(HOST, find_write_problem(cache))])[0]
    if problem is not None:
        return f"{host} cannot write to its cache of models and rows ({cache}): {problem}"
    if find_host_without(accelerator, cache, SECONDS_FOR_CACHE):
        return (
            f"each downloads and tokenizes into a cache of its own ({cache}), and writes temporary "
            f"files to its {tempfile.gettempdir()}; checkpoints are staged in --output_dir"
        )
    return f"they share the cache of models and rows ({cache})"


def find_write_problem(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, which is made if it is not there, or None."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
