# SPDX-License-Identifier: Apache-2.0
"""Launch a recipe as a user would and read what it leaves: exit code, files, figures.

Nothing here imports the product. NET_ROOT names another checkout whose recipes, YAMLs and scripts
are launched: tests/compare.py holds two commits against each other so.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jobs import SAME_AS, flags_of, narrow

REPO = Path(__file__).resolve().parents[1]
ROOT = Path(os.environ.get("NET_ROOT", REPO))
INJECTOR = REPO / "tests" / "inject.py"
TIMEOUT = 400  # seconds; a cold launch takes 10-30 on two idle cores

# ---- The job ----
# Two epochs whose last window is short (42 rows, 12 a step), a rate that rises and falls, clipping
# that takes effect, a best model that is not the last (the largest loss), and rotation
JOB = [
    *"--max_steps 8 --num_train_epochs 2 --learning_rate 2e-3 --warmup_steps 0.25".split(),
    *"--lr_scheduler_type cosine --weight_decay 0.1 --max_grad_norm 0.5".split(),
    *"--eval_strategy steps --eval_steps 2 --save_steps 3 --save_total_limit 2".split(),
    *"--load_best_model_at_end --greater_is_better true --logging_steps 1".split(),
]
# {ranks that have rows of their own: (rows per rank, accumulation)} of a step of 12 rows
CUT = {1: (3, 4), 2: (3, 2), 3: (2, 2), 4: (3, 1)}
WEIGHTS = {
    "full": [],
    "LoRA": ["--use_peft"],
    "dropout": ["--use_peft", "--lora_dropout", "0.1"],
    "int8": ["--use_peft", "--load_in_8bit"],
    "float8": ["--use_peft", "--load_in_fp8"],
    "nf4": ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant"],
}


@dataclass(frozen=True)
class Cell:
    """One launch of the job.

    Attributes:
        ranks: all of them; `sharing` of these have the same rows.
        flags: those that may change a figure; they name the golden row.
        riding: flags that may not.
        shape: words of make_tiny.py by which the model differs from that of the other cells.
    """

    config: str = "single"
    recipe: str = "llama"
    weights: str = "full"
    ranks: int = 1
    sharing: int = 1
    precision: str = "no"
    flags: tuple[str, ...] = ()
    riding: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()

    @property
    def model(self):
        """The recipe whose tiny model and rows it has."""
        return SAME_AS.get(self.recipe, self.recipe)

    @property
    def row(self):
        """The name of its golden row: what its figures depend on."""
        words = [self.model, *self.shape, self.weights, *self.flags]
        if self.precision != "no":
            words.append(self.precision)
        # Ranks with rows of their own draw masks of their own
        if self.weights == "dropout" and self.ranks > self.sharing:
            words.append(f"{self.ranks} ranks")
        return " ".join(words)

    @property
    def name(self):
        return " ".join([self.config, self.row, *self.riding])

    @property
    def arguments(self):
        batch, accumulation = CUT[self.ranks // self.sharing]
        return [
            *JOB,
            *flags_of(self.recipe),
            *("--per_device_train_batch_size", batch),
            *("--gradient_accumulation_steps", accumulation),
            *WEIGHTS[self.weights],
            *self.flags,
            *self.riding,
        ]


@dataclass
class Done:
    """How a launch ended."""

    code: int
    output: str
    folder: Path
    report: dict = field(default_factory=dict)

    def expect(self, code=0):
        assert self.code == code, f"exit code {self.code}, not {code}:\n{self.output[-4000:]}"
        return self


def run(*command, code=None, **options):
    """Run a command; the result has returncode and output (stdout and stderr together).

    Args:
        code: with which it must end; None for any.
    """
    defaults = {
        "timeout": TIMEOUT,
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    done = subprocess.run([str(word) for word in command], text=True, **defaults | options)
    done.output = done.stdout
    assert code in (None, done.returncode), f"{done.returncode}: {done.output[-4000:]}"
    return done


def make(recipe, folder, words=()):
    """Make a tiny model and its rows as a user does."""
    script = REPO / "scripts" / "make_tiny.py"
    run(sys.executable, script, recipe, folder, *words, code=0)


def make_tiny(recipe, shape, folder):
    """Make the tiny model of a recipe, and rows of which a third has two answers.

    Args:
        shape: further words of make_tiny.py, as in Cell.shape.
    """
    make(recipe, folder, [*narrow(recipe), *shape])
    for path in (folder / "data").glob("t*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if "completion" in rows[0] and "chosen" not in rows[0]:
            path.write_text("".join(json.dumps(row) + "\n" for row in conversations(rows)))


def conversations(rows):
    """The rows as conversations; every third also has the question and answer of the next."""
    for number, row in enumerate(rows):
        asked = [row, rows[(number + 1) % len(rows)]] if number % 3 == 0 else [row]
        messages = []
        for turn in asked:
            messages.append({"role": "user", "content": turn["prompt"]})
            messages.append({"role": "assistant", "content": turn["completion"]})
        yield {"messages": messages}


def data_of(tiny):
    words = ["--model_name_or_path", tiny / "model"]
    for flag, split in (("--dataset_name", "train"), ("--eval_dataset_name", "test")):
        rows = tiny / "data" / f"{split}.jsonl"
        words += [flag, rows if rows.exists() else rows.with_suffix("")]
    if (tiny / "teacher").exists():
        words += ["--teacher_model_name_or_path", tiny / "teacher"]
    return words


def launch(cell, tiny, folder, *more, inject=None, notes=None, config_file=None, script=None):
    """Launch a cell into a folder; under ranks it is a rehearsal with its shard report.

    Args:
        script: the words of a program that takes the place of the shipped recipe.
    """
    script = script or [ROOT / "recipes" / f"{cell.recipe}.py"]
    env = {}
    if inject is not None or notes is not None:
        script = [INJECTOR, *script]
        env = {"FAULT_IN_LIBRARIES": json.dumps(inject or [])}
        if notes is not None:
            env["FAULT_NOTES"] = str(notes)
    report = Path(folder).with_name(f"{Path(folder).name}.report.json")
    command = [sys.executable]
    if cell.config != "single" or config_file:
        yaml = config_file or ROOT / "accelerate_configs" / f"{cell.config}.yaml"
        command += [ROOT / "scripts" / "rehearse.py", "--device", "cpu", "--config_file", yaml]
        command += ["--num_processes", cell.ranks, "--mixed_precision", cell.precision]
        command += ["--report", report]
    elif cell.precision != "no":
        env["ACCELERATE_MIXED_PRECISION"] = cell.precision
    words = [*command, *script, *data_of(tiny), "--output_dir", folder, *cell.arguments, *more]
    # A signal to its group does not reach the tests
    done = run(*words, env=os.environ | env, start_new_session=True)
    found = read_json(report) if report.exists() else {}
    return Done(done.returncode, done.output, Path(folder), found)


# ---- What a run leaves ----
# Figures of time and memory, which no run has again, and what follows from others: perplexity from
# the loss, and small differences of large numbers, as rewards of DPO, margins of rewards and the KL
# to a model before training are
LEFT_OUT = ("seconds", "memory", "per_second", "perplexity", "rewards", "mean_reward", "margin")
LEFT_OUT += ("kl",)


def metrics(folder):
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(folder):
    """Each line of metrics.jsonl without what depends on the machine, in order."""
    lines = []
    for line in metrics(folder):
        kept = {}
        for key, value in line.items():
            if not any(word in key for word in LEFT_OUT):
                kept[key] = value
        lines.append(kept)
    return lines


def answers(folder):
    """{name of the file with the answers of an evaluation: its lines}."""
    found = {}
    for path in sorted(Path(folder).glob("predictions-*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found[path.name] = [json.loads(line) for line in lines]
    return found


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def tensors(folder):
    """{name: dtype and shape} of every tensor in the safetensors files of a result."""
    from safetensors import safe_open

    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                found[name] = [tensor.get_dtype(), *tensor.get_shape()]
    return dict(sorted(found.items()))


def saved_loss(folder, tiny):
    """The loss of a result over the texts of the held-out rows, by transformers and peft only.

    Every token counts, so that nothing of the recipe decides what is measured. Each class of model
    is loaded as its config says.
    """
    import torch

    model, processor = load_result(folder, tiny)
    losses = []
    for inputs in inputs_of(tiny, model, processor):
        with torch.no_grad():
            output = model(**inputs)
        if "labels" in inputs:
            losses.append(output.loss.item())
        else:  # of a model without a head
            losses.append(output.last_hidden_state.square().mean().item())
    return sum(losses) / len(losses)


def load_result(folder, tiny):
    """The model of a result and what prepares its inputs, as its own files say."""
    import transformers
    from peft import PeftModel

    is_adapter = (folder / "adapter_config.json").exists()
    base = tiny / "model" if is_adapter else folder
    name = read_json(base / "config.json")["architectures"][0]
    options = {}
    adapters = read_json(folder / "adapter_config.json") if is_adapter else {}
    if adapters.get("task_type") == "SEQ_CLS":
        name = "AutoModelForSequenceClassification"
    elif adapters.get("auto_mapping"):
        name = adapters["auto_mapping"]["base_model_class"]
    if is_adapter and (folder / "config.json").exists():  # The base has no head
        options["config"] = transformers.AutoConfig.from_pretrained(folder)
        vars(options["config"]).pop("quantization_config", None)
    model = getattr(transformers, name).from_pretrained(base, dtype="float32", **options)
    if is_adapter:
        model = PeftModel.from_pretrained(model, folder)
    kind = "AutoImageProcessor" if "Image" in name else "AutoTokenizer"
    if (folder / "processor_config.json").exists():
        kind = "AutoProcessor"
    return model.eval(), getattr(transformers, kind).from_pretrained(folder)


def inputs_of(tiny, model, processor):
    """The arguments of the model for each held-out row, labels among them."""
    rows = tiny / "data" / "test.jsonl"
    if not rows.exists():
        yield from images_of(rows.with_suffix(""), model, processor)
        return
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if "tokens" in row:
            words = row["tokens"]
            inputs = processor(words, is_split_into_words=True, return_tensors="pt")
            names = [row["ner_tags"][i] if i is not None else "O" for i in inputs.word_ids()]
            labels = [model.config.label2id.get(str(name), 0) for name in names]
            yield {**inputs, "labels": as_tensor([labels])}
        elif "label" in row:
            inputs = processor(row["text"], return_tensors="pt")
            yield {**inputs, "labels": as_tensor([model.config.label2id[str(row["label"])]])}
        elif "images" in row:
            messages = with_images(row, rows.parent)
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            inputs = processor.apply_chat_template(messages, **options)
            yield {**inputs, "labels": inputs["input_ids"]}
        elif "query" in row:
            yield dict(processor(row["query"], return_tensors="pt"))
        elif "source" in row:
            inputs = processor(row["source"], return_tensors="pt")
            target = processor(text_target=row["target"], return_tensors="pt")["input_ids"]
            yield {**inputs, "labels": target}
        else:
            ids = processor(text_of(row, processor), return_tensors="pt")["input_ids"]
            is_reward = model.config.problem_type == "regression"
            yield {"input_ids": ids, "labels": as_tensor([0.0]) if is_reward else ids}


def text_of(row, tokenizer):
    if "text" in row:
        return row["text"]
    messages = row.get("messages")
    if "question" in row:
        messages = [{"role": "user", "content": row["question"]}]
    if messages is None:
        messages = [*row["prompt"], *row["chosen"]]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def with_images(row, folder):
    """The messages of a row, with the paths of its images in their places."""
    left = [str(folder / name) for name in row["images"]]
    for message in row["messages"]:
        for part in message["content"]:
            if part["type"] == "image":
                part["path"] = left.pop(0)
    return row["messages"]


def images_of(folder, model, processor):
    from PIL import Image

    for path in sorted(folder.glob("*/*"))[::7]:
        inputs = processor(Image.open(path).convert("RGB"), return_tensors="pt")
        yield {**inputs, "labels": as_tensor([model.config.label2id[path.parent.name]])}


def as_tensor(values):
    import torch

    return torch.tensor(values)


def read_json(path):
    return json.loads(Path(path).read_text())


def bytes_of_result(folder):
    """{name: content} of the tensors' files of a result."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))}
