# SPDX-License-Identifier: Apache-2.0
"""The run files of examples/: how each is launched, and the memory that the planner expects.

A run file is a YAML of a recipe's arguments. The comments at its head hold the launch command and a
line with the planned memory, which `with_plan` fills in for the card that the line names.
"""

import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser

from paths import ROOT
from planner import cards, recipe, yaml_files
from planner.answer import Question, plan_one
from planner.output import Report
from planner.recipe import RecipeArguments
from planner.request import Request, batch_of
from proof.markdown import table

from .public_models import config_of

EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
PLANNED = re.compile(
    r"^# Planned memory: \S+ GiB per GPU, for an? (?P<card>\S+) with \S+ GiB\.$", re.MULTILINE
)
TABLE = re.compile(r"(?<=<!-- examples -->\n).*(?=<!-- end of examples -->)", re.DOTALL)
HEAD = ["file", "model", "method", "GPUs", "planned GiB per GPU", "card"]


@dataclass(frozen=True)
class Example:
    """A run file.

    Attributes:
        path: where it is.
        text: what it holds.
        config_file: the launcher's YAML, relative to the repository.
        num_processes: GPUs.
        recipe: name of the recipe's module.
        args: the recipe's arguments.
        card: what it is planned for, as the planner's --gpu.
    """

    path: Path
    text: str
    config_file: str
    num_processes: int
    recipe: str
    args: Any
    card: str

    @property
    def method(self) -> str:
        """What is trained, in the words of the table."""
        method = "full"
        if self.args.load_in_4bit:
            method = "QLoRA"
        elif self.args.use_peft:
            method = "LoRA"
        if self.recipe == "mistral_pretrain":
            method += ", continued pretraining"
        return method


def read_examples() -> list[Example]:
    """Return all run files by name. Raises ValueError for a head that lacks something."""
    return [read_example(path) for path in sorted(EXAMPLES.glob("*.yaml"))]


def read_example(path: Path) -> Example:
    """Return a run file. Raises ValueError for a head that lacks something."""
    text = path.read_text()
    planned = PLANNED.search(text)
    if planned is None:
        raise ValueError(f"{path}: its head has no line `# Planned memory: ...`")
    launch = launch_command_parser().parse_args(launch_words(text, path))
    name = Path(launch.training_script).stem
    return Example(
        path=path,
        text=text,
        config_file=launch.config_file,
        num_processes=launch.num_processes,
        recipe=name,
        args=read_arguments(name, path),
        card=planned["card"],
    )


def launch_words(text: str, path: Path) -> list[str]:
    """Return what follows `accelerate launch` in the head of a run file."""
    comments = [line[1:] for line in text.splitlines() if line.startswith("#")]
    for line in "\n".join(comments).replace("\\\n", " ").splitlines():
        words = shlex.split(line) if line.startswith("   accelerate launch") else []
        if words:
            return words[2:]
    raise ValueError(f"{path}: its head has no launch command")


def read_arguments(name: str, path: Path) -> Any:
    """Return the recipe's arguments in a run file, as the recipe itself reads them."""
    module = importlib.import_module(name)
    return recipe.parse_words_of(module.Arguments, ["--config", str(path)])


def planned_arguments(example: Example) -> RecipeArguments:
    """Return the arguments of recipes/llama.py that take the same memory.

    Pretraining trains on every token of blocks of --max_length tokens. So does recipes/llama.py
    with --packing, in the planner's worst case.
    """
    own = vars(example.args)
    shared = {}
    arguments = recipe.RECIPES[recipe.FIRST]
    for field in dataclasses.fields(arguments):
        if field.name in own:
            shared[field.name] = own[field.name]
    if example.recipe == "mistral_pretrain":
        shared["packing"] = True
    if shared["max_logits_mib"] is None:
        shared["max_logits_mib"] = recipe.logits_mib_on(card_bytes(example))
    return arguments(**shared)


def card_bytes(example: Example) -> int:
    """Return the memory of the card that an example names."""
    size = cards.bytes_of(example.card)
    assert size is not None  # it is None only for no card
    return size


def plan(example: Example) -> Report:
    """Return the planned memory of an example on its card. Raises UnplannableError."""
    args = planned_arguments(example)
    request = Request(num_processes=example.num_processes)
    question = Question(
        request=request,
        args=args,
        config=config_of(args.model_name_or_path),
        batch=batch_of(args, request),
        card=card_bytes(example),
    )
    return plan_one(question, yaml_files.read(ROOT / example.config_file))


def gib(size: int) -> str:
    """Return bytes in GiB, with one decimal."""
    return f"{size / cards.GIB:.1f}"


def with_plan(example: Example, report: Report) -> str:
    """Return the text of a run file with the numbers of its plan."""
    line = (
        f"# Planned memory: {gib(report.peak)} GiB per GPU, "
        f"for {article_of(example.card)} {example.card} with {gib(card_bytes(example))} GiB."
    )
    return PLANNED.sub(line, example.text)


def article_of(card: str) -> str:
    """Return the indefinite article of a card's name as it is spoken: an h100, an l4, a 4090."""
    return "an" if card.startswith(("a", "h", "l", "m")) else "a"


def with_table(page: str, examples: Iterable[Example], reports: Iterable[Report]) -> str:
    """Return the page of the examples with its table. Raises ValueError if it has no marks."""
    rows = []
    for example, report in zip(examples, reports, strict=True):
        name = example.path.name
        model = example.args.model_name_or_path.rpartition("/")[2]
        gpus = str(example.num_processes)
        row = [f"[{name}]({name})", model, example.method, gpus, gib(report.peak)]
        rows.append([*row, f"{example.card}, {gib(card_bytes(example))} GiB"])
    text, found = TABLE.subn(f"{table(HEAD, rows)}\n", page)
    if found != 1:
        raise ValueError("examples/README.md needs one <!-- examples --> with its end")
    return text


def pages() -> dict[Path, str]:
    """Return what each run file and their page should hold."""
    examples = read_examples()
    reports = [plan(example) for example in examples]
    wanted = {PAGE: with_table(PAGE.read_text(), examples, reports)}
    for example, report in zip(examples, reports, strict=True):
        wanted[example.path] = with_plan(example, report)
    return wanted
