# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are pushed, and why a folder is refused."""

import contextlib
import fnmatch
import json
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from core.export import has_result
from exits import Exit, first_line, stop
from hub_ids import is_path

ADAPTERS = "adapter_config.json"
# What is pushed: what loads the result, and what it says of itself. The rest stays here, whatever
# wrote it.
PUSHED = """
    model.safetensors model.safetensors.index.json *model-*-of-*.safetensors *.gguf config.json
    adapter_model.safetensors adapter_config.json generation_config.json preprocessor_config.json
    processor_config.json video_preprocessor_config.json audio_tokenizer_config.json tokenizer.json
    tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt
    tekken.json *.model *.spm *.tiktoken chat_template.jinja chat_template.json
    additional_chat_templates/*.jinja custom_generate/*.py custom_generate/requirements.txt
    README.md run_public.json LICENSE* NOTICE*
""".split()
SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
LARGEST_READ = 32 * 2**20  # bytes of a text file that is searched for tokens


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a path is as deep as one of these patterns, and fits it."""
    depth = name.count("/")
    return any(depth == one.count("/") and fnmatch.fnmatch(name, one) for one in patterns)


def select(source: Path) -> tuple[dict[str, int], list[str]]:
    """Return {path from the folder: bytes} of what is pushed, and the names of what stays here."""
    chosen = {}
    stays = set()
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and matches(name, PUSHED):
            chosen[name] = path.stat().st_size
        elif path.is_file():
            stays.add(Path(name).parts[0])
    return chosen, sorted(stays)


def find_unfinished(source: Path) -> str | None:
    """Return why a folder has no finished result, or None."""
    if not source.is_dir():
        return f"{source}: no such folder: give the --output_dir of a finished run"
    if source.name.endswith(".unfinished"):
        return f"{source}: was not finished: run its command again"
    status = source / "status.json"
    if status.is_file():
        try:
            state = json.loads(status.read_text())["state"]
        except (OSError, ValueError, LookupError, TypeError):
            state = "unreadable"
        if state != "done":
            return f"{source}: the run is {state}, not done: run its launch command again"
    return None


def find_unsafe(source: Path, names: list[str]) -> str | None:
    """Return which of the files must not be published, since it has a secret in it, or None."""
    for name in names:
        if has_secret(source / name):
            return f"{source / name}: has a secret in it: take it out of the file"
    return None


def find_no_result(source: Path) -> str | None:
    """Return why a folder has no result to push, or None."""
    if has_result(source):
        return None
    return f"{source}: has no model or adapters in safetensors: name the folder of a result"


def has_secret(path: Path) -> bool:
    """Return whether a file other than weights contains a token of the hub or a private key."""
    if path.suffix == ".safetensors" or path.stat().st_size > LARGEST_READ:
        return False
    with reading(path):
        return SECRET.search(path.read_bytes()) is not None


def find_local_base(source: Path) -> str | None:
    """Return the base of adapters if it is a path on this machine, or None."""
    config = source / ADAPTERS
    if not config.is_file():
        return None
    base = read_adapter_config(config).get("base_model_name_or_path") or ""
    if not base or is_path(base) or Path(base).exists():
        return base
    return None


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return the configuration of adapters; end with 65 if it is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        stop(Exit.DATA, f"{path}: not the configuration of adapters: train or merge again")


@contextlib.contextmanager
def reading(path: Path) -> Generator[None]:
    """End with 65 if a file cannot be read in this context."""
    try:
        yield
    except OSError as error:
        stop(Exit.DATA, f"cannot read {path}: {error.strerror}: make it readable, or move it out")


def with_base(source: Path, base: str) -> dict[str, bytes]:
    """Return {name: content} of the files that name the base, with its hub id in them."""
    import yaml
    from huggingface_hub import ModelCard

    config = read_adapter_config(source / ADAPTERS)
    config["base_model_name_or_path"] = base
    changed = {ADAPTERS: json.dumps(config, indent=2).encode()}
    path = source / "README.md"
    if path.is_file():
        try:
            card = ModelCard(path.read_text())
        except (ValueError, yaml.YAMLError) as error:
            reason = first_line(error)
            stop(Exit.DATA, f"{path}: the block at its top is not YAML ({reason}): correct it")
        card.data["base_model"] = base
        # peft's own card also has the path of the base in a tag.
        tags = card.data.get("tags")
        if tags:
            card.data["tags"] = [tag for tag in tags if not tag.startswith("base_model:")]
        changed["README.md"] = str(card).encode()
    return changed
