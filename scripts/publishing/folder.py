# SPDX-License-Identifier: Apache-2.0
"""What of a folder is pushed, why a folder is refused, and what is made for the push.

What is made has no path of this machine. All other files are pushed as they are.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import is_path

ADAPTERS = "adapter_config.json"
CARD = "README.md"
RUN = "run.json"
PUBLIC_RUN = "run_public.json"
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
LARGEST_READ = 32 * 2**20  # bytes of a file that is searched for secrets
# Arguments by which a result is loaded, merged, asked and evaluated
NEEDED = """
    assistant_only_loss bnb_4bit_quant_type bnb_4bit_use_double_quant chat_template_kwargs columns
    completion_only_loss dtype learn load_in_4bit load_in_8bit max_length model_revision
""".split()


# ---- Which files, and which folders ----
def matches(name: str) -> bool:
    """Return whether a path is as deep as one of the patterns, and fits it."""
    depth = name.count("/")
    return any(depth == one.count("/") and fnmatch.fnmatch(name, one) for one in PUSHED)


def select(source: Path) -> tuple[list[str], list[str]]:
    """Return the paths from the folder of what is pushed, and the names of what stays here."""
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    chosen = sorted(filter(matches, names))
    stays = {name.partition("/")[0] for name in names if not matches(name)}
    return chosen, sorted(stays)


def find_problem(source: Path) -> str | None:
    """Return why a folder is not pushed, or None."""
    from core.export import has_result  # imports torch, for seconds

    if source.name.endswith(".unfinished"):
        return f"{source}: was not finished: run its command again"
    status = source / "status.json"
    if status.is_file() and '"state": "done"' not in status.read_text():
        return f"{source}: the run is not done, as status.json says: run its launch command again"
    if not has_result(source):
        return f"{source}: has no model or adapters in safetensors: name the folder of a result"
    return None


def find_secret(texts: Mapping[str, bytes]) -> str | None:
    """Return which of the texts has a token of the hub or a private key in it, or None."""
    for name, content in texts.items():
        if SECRET.search(content):
            return f"{name}: has a secret in it: take it out of the file"
    return None


def read_texts(source: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the content of each file that is small enough to be a text."""
    paths = [source / name for name in names if not name.endswith((".safetensors", ".gguf"))]
    small = [path for path in paths if path.stat().st_size <= LARGEST_READ]
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in small}


# ---- What is made for the push ----
def make_copies(source: Path, base: str | None) -> dict[str, bytes]:
    """Return {name: what is pushed in place of the file that is here, or is not}.

    Args:
        base: the hub id that takes the place of a base on this machine, if any.
    """
    copies = {}
    if base is not None:
        config = json.loads((source / ADAPTERS).read_text())
        config["base_model_name_or_path"] = base
        copies[ADAPTERS] = json.dumps(config, indent=2)
    if (source / RUN).is_file():
        run = json.loads((source / RUN).read_text())
        copies[PUBLIC_RUN] = json.dumps(public_record(source, run), indent=2)
        if not (source / CARD).is_file():  # Otherwise it is the user's own
            copies[CARD] = card_of(source, run, base)
    return {name: f"{text}\n".encode() for name, text in copies.items()}


def public_record(source: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of run.json is pushed: the base's fingerprint, and NEEDED.

    The name of the base is left out where adapter_config.json has it.
    """
    arguments = run["arguments"]
    kept = {name: arguments[name] for name in NEEDED if name in arguments}
    base = arguments.get("model_name_or_path")
    if base and is_hub_id(base) and not (source / ADAPTERS).is_file():
        kept["model_name_or_path"] = base
    record: dict[str, Any] = {"arguments": kept}
    if run.get("base_weights") is not None:
        record["base_weights"] = run["base_weights"]
    return record


def local_base(source: Path) -> str | None:
    """Return the base of adapters if it is a path on this machine, or None."""
    if not (source / ADAPTERS).is_file():
        return None
    base = json.loads((source / ADAPTERS).read_text()).get("base_model_name_or_path")
    if not base or is_hub_id(base):
        return None
    return base


def is_hub_id(name: str) -> bool:
    """Return whether a name is an id of the hub, and no file or folder of this machine."""
    shaped = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
    return shaped and not is_path(name) and not Path(name).exists()


# ---- The card ----
def card_of(source: Path, run: Mapping[str, Any], base: str | None) -> str:
    """Return the card of a run's result: numbers, hub ids, and the last part of any path.

    The license is left to the user, who knows it.

    Args:
        base: the hub id that takes the place of a base on this machine, if any.
    """
    from huggingface_hub import ModelCardData  # Takes time

    arguments = run["arguments"]
    base = base or arguments["model_name_or_path"]
    rows = arguments.get("dataset_name") or []
    rows = [rows] if isinstance(rows, str) else rows
    data = ModelCardData(library_name="transformers", datasets=list(filter(is_hub_id, rows)))
    if arguments.get("use_peft"):
        data.library_name = "peft"
    if is_hub_id(base):
        data.base_model = base
    settings = [(name, value) for name, value in arguments.items() if type(value) in (int, float)]
    settings.append(("hash of the training rows", run.get("data")))
    listed = ", ".join(map(public_name, rows))
    parts = [f"---\n{data.to_yaml()}\n---", f"# {source.resolve().name}"]
    parts.append(f"Trained from `{public_name(base)}` on {listed}.")
    parts.append(table("Settings", settings))
    parts += results(source / "metrics.jsonl")
    parts.append(table("Versions", run.get("versions", {}).items()))
    return "\n\n".join(parts)


def public_name(name: str) -> str:
    """Return a hub id as it is, and of a path its last part."""
    if is_hub_id(name):
        return name
    return Path(name).name


def results(path: Path) -> Iterator[str]:
    """Yield the last evaluation and the last logged step of metrics.jsonl."""
    last: dict[str, Mapping[str, Any]] = {}
    if path.is_file():
        for line in map(json.loads, path.read_text().splitlines()):
            is_evaluation = any(name.startswith("eval_") for name in line)
            last["Evaluation" if is_evaluation else "Last training step"] = line
    for kind, line in sorted(last.items()):
        yield table(f"{kind}, after step {line['step']}", line.items())


def table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Return a section with a table of names and values."""
    lines = [f"## {title}", "", "| name | value |", "| --- | --- |"]
    for name, value in rows:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)
