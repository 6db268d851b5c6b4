# SPDX-License-Identifier: Apache-2.0
"""The model card of a result: OUTPUT_DIR/README.md, from what the run itself has recorded.

A card is for other people: it has no path of this machine, no token and no row of the data.
"""

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components import folder
from components.hub_ids import is_path
from components.launch_command import find_readable_launch
from components.status import write_file

CARD = "README.md"
MARKER = "<!-- Written by accelerate-recipes: remove this line to keep changes of your own. -->"
STUB = ("# Model Card for Model ID", "[More Information Needed]")  # peft writes both
ABSOLUTE = re.compile(r"(?<![\w.:/~-])~?/[^\s'\"`,;:)\]]+")
TOKEN = re.compile(r"\b(hf|sk|api|ghp)_[A-Za-z0-9_-]{8,}")
PRIVATE_LINES = ("sample", "warning", "WARNING")  # Lines of the summary that a card leaves out
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
# Arguments about the place and the course of a run, and not about its result
NOT_LEARNING = {"output_dir", "model_name_or_path", "dataset_name", "eval_dataset_name"}


def write_card(args: Any, best: Any = None) -> str | None:
    """Write the card of the run in `args.output_dir`, and return why not, or None.

    The main process calls this once the model is saved. A README.md of the user's own is left.

    Args:
        args: the recipe's arguments, a dataclass.
        best: the run's BestEvaluation, or None.
    """
    path = Path(args.output_dir, CARD)
    if not may_replace(path):
        return f"{path.name} is not from a run and is left as it is: the model card is not written"
    try:
        write_file(path, card_of(args, best))
    except Exception as error:  # The model is saved: no error of a card may end such a run.
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
    return MARKER in text or all(words in text for words in STUB)


def card_of(args: Any, best: Any) -> str:
    """Return the text of the card. Raises OSError and ValueError if the run's files are damaged."""
    from huggingface_hub import ModelCard  # Takes time, and only the end of a run needs it

    output = Path(args.output_dir)
    run = json.loads((output / folder.RUN).read_text())
    clean = Cleaner(run["arguments"])
    data = metadata_of(args, output)
    versions = sorted(run["versions"].items())
    loading = code_to_load(data.library_name, data.pipeline_tag)
    sections = {
        "Data": data_lines(args, run, clean),
        "Training": summary_lines(run, clean),
        "Results": result_lines(read_metrics(output), best),
        "Loss": curve_of(output),
        "Hyperparameters that differ from the defaults": changed_lines(args, clean),
        "Versions": table(("library", "version"), versions),
        "Command": fenced("bash", command_of(clean)),
        "Load it": fenced("python", loading),
    }
    parts = [f"# {clean(output.resolve().name)}", MARKER, base_lines(args, run, clean)]
    parts += [section(title, text) for title, text in sections.items()]
    body = "\n\n".join(part for part in parts if part)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


# ---- What must not be published ----
class Cleaner:
    """Takes paths of this machine and tokens out of texts."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Note the run's own paths, which may have spaces.

        Args:
            arguments: those of run.json.
        """
        found = set()
        for value in arguments.values():
            for word in words_of(value):
                if word.startswith(("/", "~")):
                    found.add(word)
        self._paths = sorted(found, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return a text in which a path is its last part, and a token is masked."""
        for path in self._paths:
            text = text.replace(path, last_part(path))
        text = ABSOLUTE.sub(lambda found: last_part(found[0]), text)
        text = TOKEN.sub(lambda found: f"{found[1]}_***", text)
        return text


def last_part(path: str) -> str:
    """Return the last part of a path; that of the home folder, a user's name, is hidden."""
    if Path(path).expanduser() == Path.home():
        return "home"
    return Path(path).name


def words_of(value: Any) -> list[str]:
    """Return the texts of an argument: it may be one, several or none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)):
        return [word for word in value if isinstance(word, str)]
    return []


def is_hub_id(name: str) -> bool:
    """Return whether a name is an id of the hub, and no file or folder of this machine."""
    shaped = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
    return shaped and not is_path(name) and not Path(name).exists()


# ---- Parts ----
def metadata_of(args: Any, output: Path) -> Any:
    """Return the ModelCardData. The license is left to the user, who knows it."""
    from huggingface_hub import ModelCardData

    base = args.model_name_or_path
    tags = ["accelerate", "lora"] if args.use_peft else ["accelerate"]
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


def base_lines(args: Any, run: Mapping[str, Any], clean: Cleaner) -> str:
    """Return what was trained from."""
    revision = getattr(args, "model_revision", None) or "not given"
    lines = [f"Trained from `{clean(args.model_name_or_path)}` (revision: {clean(revision)})."]
    if "base_weights" in run:
        lines.append(f"Fingerprint of the base's weights: `{run['base_weights']}`.")
    return "\n".join(lines)


def data_lines(args: Any, run: Mapping[str, Any], clean: Cleaner) -> str:
    """Return the files or data sets, the hash of their rows, and rows per step."""
    rows = []
    for name in ("dataset_name", "eval_dataset_name"):
        for word in words_of(getattr(args, name, None)):
            rows.append((name, clean(word)))
    for name in ("data", "rows_per_step"):
        if name in run:
            rows.append((name, clean(json.dumps(run[name]))))
    return table(("what", "value"), rows)


def summary_lines(run: Mapping[str, Any], clean: Cleaner) -> str:
    """Return strategy, precision, hardware and more, as the run's summary told them."""
    rows = []
    launch = find_readable_launch()
    if launch is not None and launch.config_file:
        rows.append(("YAML", Path(launch.config_file).name))
    for name, text in run["summary"].items():
        if name not in PRIVATE_LINES:
            rows.append((name, clean(text)))
    rows.append(("hardware", hardware()))
    return table(("what", "value"), rows)


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
    """Return the last logged step, the last evaluation, and the best one if the run kept it."""
    last: dict[str, Any] = {}
    for line in metrics:
        last.update(line)
    text = table(("metric", "last value"), last.items())
    if best is not None:
        text += f"\n\nBest evaluation: {best.metric} {best.value:.6g} after step {best.step}."
    return text


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
                if value is not True:  # An option such as --cpu has no value.
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
