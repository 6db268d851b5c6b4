#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Show what of a run's folder would be pushed to the hub, and push it: private by default.

    python scripts/push.py runs/lora owner/name           # shows, and asks on a terminal
    python scripts/push.py runs/lora owner/name --yes     # pushes to a private repository
    python scripts/push.py runs/lora owner/name --base_model owner/base --yes

Checkpoints, logs, answers, caches and unfinished files stay here. --base_model is the hub id of the
base; it replaces the path of a base on this machine in the pushed copy only. What is made for the
push, the card of a run and what of its run.json is pushed, has no path of this machine; all other
files are pushed as they are. A push that was cut is run again with the same command.

Exit codes: 0 done, 64 usage, 65 data, 69 hub.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Exit, Parser, first_line, is_path, run_command, stop

ADAPTERS = "adapter_config.json"
CARD = "README.md"
RUN = "run.json"
PUBLIC_RUN = "run_public.json"  # the base's fingerprint, and NEEDED
# What is pushed: what loads the result, and what it says of itself. The rest stays here, whatever
# wrote it.
PUSHED = """
    model.safetensors model.safetensors.index.json *model-*-of-*.safetensors *.gguf config.json
    adapter_model.safetensors adapter_config.json generation_config.json preprocessor_config.json
    processor_config.json video_preprocessor_config.json audio_tokenizer_config.json tokenizer.json
    tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt
    tekken.json *.model *.spm *.tiktoken chat_template.jinja chat_template.json
    additional_chat_templates/*.jinja custom_generate/*.py custom_generate/requirements.txt
    modules.json 1_Pooling/config.json config_sentence_transformers.json sentence_bert_config.json
    README.md run_public.json LICENSE* NOTICE*
""".split()
SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
LARGEST_READ = 32 * 2**20  # bytes of a file that is searched for secrets
# Arguments by which a result is loaded, merged, asked and evaluated
NEEDED = """
    assistant_only_loss bnb_4bit_quant_type bnb_4bit_use_double_quant chat_template_kwargs columns
    completion_only_loss dtype learn load_in_4bit load_in_8bit load_in_fp8 max_length
    model_revision
""".split()


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="output folder of a finished run, or of a merge")
    add("repo_id", help="owner/name, or a name of your own")
    add("--public", action="store_true", help="let everyone see a new repository")
    add("--revision", help="branch to push to, which must exist [main]")
    add("--base_model", help="hub id of the base, in place of a path on this machine")
    add("--yes", action="store_true", help="push without asking")
    return parser.parse_args()


# ---- Which files, and which folders ----
def select(source: Path) -> tuple[list[str], list[str]]:
    """Return the paths from the folder of what is pushed, and the names of what stays here."""
    files = {path for path in source.rglob("*") if path.is_file()}
    chosen = files & {path for one in PUSHED for path in source.glob(one)}
    names = sorted(path.relative_to(source).as_posix() for path in chosen)
    return names, sorted({path.relative_to(source).parts[0] for path in files - chosen})


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
        kept = {name: run["arguments"][name] for name in NEEDED if name in run["arguments"]}
        trained = run["arguments"].get("model_name_or_path")
        # adapter_config.json names the base of adapters
        if trained and is_hub_id(trained) and not (source / ADAPTERS).is_file():
            kept["model_name_or_path"] = trained
        record: dict[str, Any] = {"arguments": kept}
        if run.get("base_weights") is not None:
            record["base_weights"] = run["base_weights"]
        copies[PUBLIC_RUN] = json.dumps(record, indent=2)
        if not (source / CARD).is_file():  # Otherwise it is the user's own
            copies[CARD] = card_of(source, run, base)
    return {name: f"{text}\n".encode() for name, text in copies.items()}


def is_hub_id(name: str) -> bool:
    """Return whether a name is an id of the hub, and no file or folder of this machine."""
    shaped = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
    return shaped and not is_path(name) and not Path(name).exists()


# ---- The card ----
def card_of(source: Path, run: Mapping[str, Any], base: str | None) -> str:
    """Return the card of a run's result: hub ids, and the last part of any path.

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
    if (source / "modules.json").is_file():
        data.library_name = "sentence-transformers"
    if is_hub_id(base):
        data.base_model = base
    listed = ", ".join(map(public_name, rows))
    text = f"# {source.resolve().name}\n\nTrained from `{public_name(base)}` on {listed}."
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def public_name(name: str) -> str:
    """Return a hub id as it is, and of a path its last part."""
    if is_hub_id(name):
        return name
    return Path(name).name


# ---- The push ----
def check(source: Path, base: str | None) -> None:
    """End with 64 or 65 for a folder that is not pushed, or whose base the hub would not find."""
    from core.export import has_result  # imports torch, for seconds

    status = source / "status.json"
    if source.name.endswith(".unfinished"):
        stop(Exit.DATA, f"{source}: was not finished: run its command again")
    if status.is_file() and '"state": "done"' not in status.read_text():
        stop(Exit.DATA, f"{source}: the run is not done: run its launch command again")
    if not has_result(source):
        stop(Exit.DATA, f"{source}: has no model or adapters in safetensors")
    adapters = source / ADAPTERS
    if not adapters.is_file():
        if base is not None:
            stop(Exit.USAGE, "--base_model is for adapters, and this folder has a whole model")
        return
    named = json.loads(adapters.read_text()).get("base_model_name_or_path")
    if base is None and named and not is_hub_id(named):
        fix = "pass --base_model ID, its id on the hub"
        stop(Exit.USAGE, f"the base of these adapters, {named}, is only on this machine: {fix}")


def push(args: argparse.Namespace, contents: Mapping[str, Any]) -> None:
    """Create the repository if there is none, and upload the files in one commit.

    Args:
        contents: {name: the path of a file here, or its content}.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        stop(Exit.NO_HUB, "there is no token of the hub: hf auth login")
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    try:
        repo = api.create_repo(args.repo_id, private=not args.public, exist_ok=True)
        message = "Upload model"
        api.create_commit(repo.repo_id, operations, commit_message=message, revision=args.revision)
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ or error  # That of an upload is the cause of a RuntimeError
        stop(Exit.NO_HUB, f"the push ended ({first_line(cause)}): run the same command again")
    print(f"Pushed {len(contents)} files to {repo}")


def main() -> None:
    args = parse_args()
    check(args.folder, args.base_model)
    names, stays = select(args.folder)
    made = make_copies(args.folder, args.base_model)
    texts = dict(made)  # of files that are small enough to be a text
    for name in set(names) - made.keys():
        path = args.folder / name
        if path.suffix not in (".safetensors", ".gguf") and path.stat().st_size <= LARGEST_READ:
            texts[name] = path.read_bytes()
    for name, content in texts.items():
        if SECRET.search(content):
            stop(Exit.DATA, f"{name}: has a secret in it: take it out of the file")
    contents: dict[str, Any] = {name: str(args.folder / name) for name in names} | made
    sizes = {name: (args.folder / name).stat().st_size for name in names}
    sizes |= {name: len(content) for name, content in made.items()}
    for name, size in sorted(sizes.items()):
        print(f"{size:>16,}  {name}")
    print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files")
    print(f"stays here: {', '.join(stays) or 'nothing'}")
    seen = "public" if args.public else "private"
    print(f"to: {args.repo_id}, revision {args.revision or 'main'}, {seen} if it is new")
    # Only a user on a terminal is asked
    if args.yes or (sys.stdin.isatty() and input("Push this? [y/N] ").lower() in ("y", "yes")):
        push(args, contents)
    else:
        print("Nothing was pushed. To push: the same command with --yes")


if __name__ == "__main__":
    run_command(main)
