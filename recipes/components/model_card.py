# SPDX-License-Identifier: Apache-2.0
"""The model card of a result: OUTPUT_DIR/README.md, from what the run itself has recorded.

A card is for other people: it has no path of this machine, no token and no row of the data.
"""

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import folder
from components.folder import CARD, MARKER
from components.launch_command import find_readable_launch
from components.private_text import Cleaner, is_hub_id, words_of
from components.status import write_file

STUB = ("# Model Card for Model ID", "[More Information Needed]")  # peft writes both
PRIVATE_LINES = ("sample", "warning", "WARNING")  # Lines of the summary that a card leaves out
# How the card calls a line of the summary or of run.json whose name says too little without them
READABLE = {
    "loss": "computation of the loss",
    "data": "hash of the rows",
    "rows_per_step": "rows per step",
    "dataset_name": "training rows",
    "eval_dataset_name": "evaluation rows",
}
CURVE_LINES = 10
PICTURE = "loss.png"
TASKS = {
    "CAUSAL_LM": "text-generation",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}
LOADERS = {
    "text-generation": "CausalLM",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "image-classification": "ImageClassification",
}
# Numbers of a logged step that say nothing of the result
NOT_RESULTS = ("step", "elapsed_seconds")
# Options of the launcher with addresses of machines
ADDRESSES = ("main_process_ip", "rdzv_conf")
# What the run's files and libraries raise when they are damaged, and when there is no room
CARD_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
# Arguments about the place and the course of a run, and not about its result
NOT_LEARNING = {"output_dir", "model_name_or_path", "dataset_name", "eval_dataset_name"}


@dataclass(frozen=True)
class CardNotes:
    """What a card says that is not in the files of the run.

    Attributes:
        method: what the recipe says of its loss and its metrics.
        tags: of the recipe's own, for the hub.
        best: the run's BestEvaluation, or None.
        seconds: of training, those before a checkpoint included; None if that is not known.
        resumed_after: the step after which the last call began; 0 if the run was never stopped.
    """

    method: str = ""
    tags: Sequence[str] = ()
    best: Any = None
    seconds: float | None = None
    resumed_after: int = 0


NO_NOTES = CardNotes()


def write_card(args: Any, notes: CardNotes = NO_NOTES) -> str | None:
    """Write the card of the run in `args.output_dir`, and return why not, or None.

    The main process calls this once the model is saved. A README.md of the user's own is left.

    Args:
        args: the recipe's arguments, a dataclass.
    """
    path = Path(args.output_dir, CARD)
    if not may_replace(path):
        return f"{path.name} is not from a run and is left as it is: the model card is not written"
    try:
        write_file(path, card_of(args, notes))
    except CARD_ERRORS as error:  # The model is saved: such a run is done also without its card.
        return f"the model card is not written: {type(error).__name__}: {error}".splitlines()[0]
    return None


def may_replace(path: Path) -> bool:
    """Return whether a card may be written here: there is none, one of ours, or peft's stub."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return MARKER in text or is_stub(text)


def is_stub(text: str) -> bool:
    """Return whether a card is the one that peft writes beside adapters, with nothing filled in."""
    return all(words in text for words in STUB)


def card_of(args: Any, notes: CardNotes) -> str:
    """Return the text of the card. Raises one of CARD_ERRORS if the run's files are damaged."""
    output = Path(args.output_dir)
    run = json.loads((output / folder.RUN).read_text())
    clean = Cleaner(run["arguments"])
    data = metadata_of(args, output, notes)
    versions = sorted(run["versions"].items())
    loading = code_to_load(data.library_name, data.pipeline_tag)
    sections = {
        "Data": data_lines(run, clean),
        "Training": table(("what", "value"), training_rows(run, clean, notes)),
        "Results": result_lines(read_metrics(output), notes.best),
        "Loss": curve_of(output),
        "Hyperparameters that differ from the defaults": changed_lines(args, clean),
        "Versions": table(("library", "version"), versions),
        "Command": fenced("bash", command_of(clean)),
        "Load it": fenced("python", loading),
    }
    title = clean(output.resolve().name)
    intro = [describe_method(args, notes), base_lines(args, run, clean)]
    return join(data, title, intro, sections)


def join(data: Any, title: str, intro: Sequence[str], sections: Mapping[str, str]) -> str:
    """Return a card.

    Args:
        data: ModelCardData.
        intro: paragraphs before the first section.
        sections: {title: text}; those without text are left out.
    """
    from huggingface_hub import ModelCard  # Takes time, and only the end of a run needs it

    parts = [f"# {title}", MARKER, *intro]
    parts += [section(name, text) for name, text in sections.items()]
    body = "\n\n".join(part for part in parts if part)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


# ---- Parts ----
def metadata_of(args: Any, output: Path, notes: CardNotes) -> Any:
    """Return the ModelCardData. The license is left to the user, who knows it."""
    from huggingface_hub import ModelCardData

    base = args.model_name_or_path
    tags = ["accelerate", *notes.tags]
    if args.use_peft:
        tags.append("lora")
    names = [name for name in words_of(args.dataset_name) if is_hub_id(name)]
    return ModelCardData(
        library_name="peft" if args.use_peft else "transformers",
        base_model=base if is_hub_id(base) else None,
        datasets=names or None,
        pipeline_tag=task_of(output),
        tags=tags,
    )


def task_of(output: Path) -> str | None:
    """Return the hub's name of the task that a saved model does, or None if that is not known."""
    kinds: list[str] = []
    for name, key in (("adapter_config.json", "task_type"), ("config.json", "architectures")):
        if (output / name).is_file():
            kinds += words_of(json.loads((output / name).read_text()).get(key))
    for kind in kinds:
        for ending, task in TASKS.items():
            if kind.endswith(ending):
                return task
    return None


def describe_method(args: Any, notes: CardNotes) -> str:
    """Return what kind of training it was, which is the docstring of the recipe's arguments."""
    kind = (type(args).__doc__ or "").strip().split("\n")[0]
    if kind.startswith(f"{type(args).__name__}("):  # dataclass has made it of the signature.
        kind = ""
    return " ".join(part for part in (kind, notes.method) if part)


def base_lines(args: Any, run: Mapping[str, Any], clean: Cleaner) -> str:
    """Return what was trained from."""
    base = args.model_name_or_path
    where = "which is not on the hub"
    if is_hub_id(base):
        where = f"revision {clean(getattr(args, 'model_revision', None) or 'not given')}"
    lines = [f"Trained from `{clean(base)}`, {where}."]
    if "base_weights" in run:
        lines.append(f"Fingerprint of the base's weights: `{run['base_weights']}`.")
    return "\n".join(lines)


def data_lines(run: Mapping[str, Any], clean: Cleaner) -> str:
    """Return the files or data sets, the hash of their rows, and rows per step."""
    rows = []
    for name in ("dataset_name", "eval_dataset_name"):
        for word in words_of(run["arguments"].get(name)):
            rows.append((READABLE[name], clean(word)))
    for name in ("data", "rows_per_step"):
        if name in run:
            rows.append((READABLE[name], clean(str(run[name]))))
    return table(("what", "value"), rows)


def training_rows(
    run: Mapping[str, Any], clean: Cleaner, notes: CardNotes
) -> list[tuple[str, str]]:
    """Return the summary, with what only this process knows: its launcher, hardware and time."""
    rows = []
    launch = find_readable_launch()
    if launch is not None and launch.config_file:
        rows.append(("YAML", Path(launch.config_file).name))
    rows += summary_rows(run, clean)
    rows.append(("hardware", hardware()))
    if notes.seconds is not None:
        rows.append(("training time", f"{notes.seconds:,.0f} s"))
    if notes.resumed_after:
        rows.append(("resumed", f"the last time after step {notes.resumed_after:,}"))
    return rows


def summary_rows(run: Mapping[str, Any], clean: Cleaner) -> list[tuple[str, str]]:
    """Return strategy, precision and more, as the run's summary told them."""
    rows = []
    for name, text in run.get("summary", {}).items():
        if name not in PRIVATE_LINES:
            rows.append((READABLE.get(name, name), clean(text)))
    return rows


def hardware() -> str:
    """Return the accelerators or CPU cores of this host."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} on the main host"
    return f"CPU with {os.cpu_count()} cores"


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    lines = (output / folder.METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]


def result_lines(metrics: Sequence[Mapping[str, Any]], best: Any) -> str:
    """Return the last evaluation, the best one if the run kept it, and the last logged step."""
    parts = []
    for what, prefix in (("Evaluation", "eval_"), ("Training", "")):
        lines = [line for line in metrics if is_evaluation(line) == bool(prefix)]
        if not lines:
            continue
        last = lines[-1]
        rows = [(name, last[name]) for name in last if name not in NOT_RESULTS]
        parts.append(f"{what} after step {last['step']}:")
        parts.append(table(("metric", "value"), rows))
    if best is not None:
        parts.append(f"Best evaluation: {best.metric} {best.value:.6g} after step {best.step}.")
    return "\n\n".join(parts)


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is that of an evaluation."""
    return any(name.startswith("eval_") for name in line)


def curve_of(output: Path) -> str:
    """Return the picture of the loss if there is one, or else a table of at most ten steps."""
    if (output / PICTURE).is_file():
        return f"![Loss by step]({PICTURE})"
    rows = []
    for line in read_metrics(output):
        if line.get("loss") is not None:
            rows.append((line["step"], line["loss"]))
    stride = -(-len(rows) // CURVE_LINES) or 1
    kept = rows[::-1][::stride][::-1]  # The last step is always among them.
    return table(("step", "loss"), kept)


def changed_lines(args: Any, clean: Cleaner) -> str:
    """Return the arguments that are not at their defaults, without those about places."""
    rows = []
    for field in dataclasses.fields(args):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(args, field.name)
        if value != default and field.name not in NOT_LEARNING:
            rows.append((f"--{field.name}", clean(str(value))))
    return table(("argument", "value"), rows)


def command_of(clean: Cleaner) -> str:
    """Return the command that launched this process, with the last parts of its paths."""
    words = [sys.argv[0], *sys.argv[1:]]
    launch = find_readable_launch()
    if launch is not None:
        options: list[str] = []
        for name, value in launch.given.items():
            if name not in ("training_script", "training_script_args") and value is not False:
                options.append(f"--{name}")
                if name in ADDRESSES:
                    options.append("***")
                elif value is not True:  # An option such as --cpu has no value.
                    options.append(str(value))
        words = ["accelerate", "launch", *options, *words]
    cleaned = [clean(word) for word in words]
    return shlex.join(cleaned)


def code_to_load(library: str | None, task: str | None) -> str:
    """Return the lines of Python that load the result."""
    kind = LOADERS.get(task or "", "Seq2SeqLM")
    if library == "peft":
        name = f"AutoPeftModelFor{kind}"
        if task == "image-classification":
            name = "AutoPeftModel"
        return f'from peft import {name}\n\nmodel = {name}.from_pretrained("REPO_OR_FOLDER")'
    name = f"AutoModelFor{kind}"
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("REPO_OR_FOLDER")'


# ---- Markdown ----
def section(title: str, text: str) -> str:
    """Return a section, or "" if it has no text."""
    return f"## {title}\n\n{text}" if text else ""


def fenced(language: str, text: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text}\n```"


def table(head: tuple[str, str], rows: Any) -> str:
    """Return a table of two columns, or "" without rows."""
    lines = []
    for name, value in rows:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        text = text.replace("|", "\\|").replace("\n", "<br>")
        lines.append(f"| {name} | {text} |")
    if not lines:
        return ""
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *lines])
