# SPDX-License-Identifier: Apache-2.0
"""Foreign code in a checkpoint or a model is never run, and no secret is written."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from exits import Exit
from proof import damage
from proof.faults import Fault
from proof.trials.lab import Lab
from proof.trials.trial import BROKEN, Group, Result, Trial, make_job

# Pickles that other programs leave in a checkpoint or in a model's folder
PICKLES = (
    "optimizer.bin",
    "scheduler.bin",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
    "pytorch_model.bin",
    "training_args.bin",
    "adapter_model.bin",
)
PICKLES_OF_MODELS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "tokenizer.pkl")
# {file of a checkpoint that is replaced by a pickle: the exit code that the run must have}
FORGED = {
    None: Exit.DONE,
    "latest": Exit.DONE,
    "manifest.json": Exit.DATA,
    "state.safetensors": Exit.DATA,
    "progress.json": Exit.DATA,
}
SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MY_PASSWORD",
    "ACCELERATE_MY_TOKEN",
)


# ---- Checkpoints ----


def pickles_in_a_checkpoint(lab: Lab, folder: Path, forged: str | None) -> Result:
    """Pickles beside the files of a checkpoint, or in place of one, are not loaded.

    Args:
        forged: the file that is replaced by a pickle, with a manifest that matches it.
    """
    mark = lab.folder / f"{folder.name}_mark"
    job = make_job()
    lab.run(job, folder, [Fault("SIGTERM", "summed_loss", step=2)])
    checkpoint = folder / "checkpoint-2"
    for place in (checkpoint, folder):
        for name in PICKLES:
            damage.torch_pickle(place / name, mark)
    put_forged(folder, forged, mark)
    ended = lab.run(job, folder)
    ok = ended.code == FORGED[forged] and not mark.exists()
    return Result(ok, note=f"{ended.code}: {ended.tail}")


def put_forged(folder: Path, forged: str | None, mark: Path) -> None:
    """Replace one file by a pickle."""
    checkpoint = folder / "checkpoint-2"
    if forged == "latest":
        damage.plain_pickle(folder / "latest", mark)
        damage.plain_pickle(folder / "status.json", mark)
    elif forged == "manifest.json":
        damage.plain_pickle(checkpoint / forged, mark)
    elif forged is not None:
        damage.forge(checkpoint, forged, mark)


# ---- Models ----


def code_in_a_model(lab: Lab, folder: Path, name: str) -> Result:
    """A model folder with foreign code trains without it, or is refused."""
    mark = lab.folder / f"{folder.name}_mark"
    model = lab.folder / f"{folder.name}_model"
    shutil.copytree(lab.tiny_of(make_job()) / "model", model, dirs_exist_ok=True)
    for pickle in PICKLES_OF_MODELS:
        damage.torch_pickle(model / pickle, mark)
    put_code = MODELS[name]
    put_code(lab, model, name, mark)
    flags = ("--model_name_or_path", model, "--max_steps", "1")
    ended = lab.run(make_job(), folder, flags=flags)
    ok = ended.code in (Exit.DONE, Exit.USAGE) and not mark.exists()
    return Result(ok, note=f"{ended.code}: {ended.tail}")


def put_model_code(lab: Lab, model: Path, name: str, mark: Path) -> None:
    """Add a module with classes of the model, which its config names."""
    write_module(model / name, mark)
    classes = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    set_in(model / "config.json", auto_map=classes)


def put_tokenizer_code(lab: Lab, model: Path, name: str, mark: Path) -> None:
    """Add a module with a tokenizer, which its config names."""
    write_module(model / name, mark)
    set_in(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_x.X"]})


def write_module(path: Path, mark: Path) -> None:
    """Write a module that makes the file `mark` when it is imported."""
    path.write_text(f"import os\nos.system('touch {mark}')\n")


def set_in(path: Path, **settings: Any) -> None:
    """Change settings in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def put_adapter(lab: Lab, model: Path, name: str, mark: Path) -> None:
    """Add an adapter whose weights are a pickle."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(lab.tiny_of(make_job()) / "model"),
        "r": 8,
        "target_modules": ["q_proj"],
    }
    (model / "adapter_config.json").write_text(json.dumps(config))
    damage.torch_pickle(model / name, mark)


def put_torch_pickle(lab: Lab, model: Path, name: str, mark: Path) -> None:
    """Replace the weights of a folder by a pickle of torch."""
    (model / "model.safetensors").unlink(missing_ok=True)
    damage.torch_pickle(model / name, mark)


def put_plain_pickle(lab: Lab, model: Path, name: str, mark: Path) -> None:
    """Replace the weights of a folder by a plain pickle."""
    (model / "model.safetensors").unlink(missing_ok=True)
    damage.plain_pickle(model / name, mark)


MODELS = {
    "pytorch_model.bin": put_torch_pickle,
    "adapter_model.bin": put_adapter,
    "modeling_x.py": put_model_code,
    "tokenization_x.py": put_tokenizer_code,
    "tokenizer.json": put_plain_pickle,
    "model.safetensors": put_plain_pickle,
}


# ---- Secrets ----


def keep_secrets(lab: Lab, folder: Path) -> Result:
    """No value of a secret in the environment is printed or written."""
    secrets = {name: f"planted-{name.lower()}-7391" for name in SECRETS}
    flags = ("--save_steps", "5")
    ended = lab.run(make_job("ddp"), folder, flags=flags, environment=secrets)
    texts = [ended.output.encode()]
    texts += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    leaked = []
    for name, value in secrets.items():
        if any(value.encode() in text for text in texts):
            leaked.append(name)
    note = " ".join(leaked) if ended.code == 0 else ended.tail
    return Result(ended.code == 0 and not leaked, len(leaked), note)


def trials() -> list[Trial]:
    """Return the trials with checkpoints, models and secrets."""
    found = []
    for forged in FORGED:
        attempt = partial(pickles_in_a_checkpoint, forged=forged)
        what = "a pickle in a checkpoint is never run"
        found.append(Trial(what, f"forged: {forged}", attempt))
    for name in MODELS:
        attempt = partial(code_in_a_model, name=name)
        found.append(Trial("foreign code in a model is never run", name, attempt))
    found.append(Trial("no secret is written", "ddp", keep_secrets))
    return found


GROUPS = [Group("foreign", BROKEN, trials)]
