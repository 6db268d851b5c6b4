# SPDX-License-Identifier: Apache-2.0
"""Every command in the documents, in the docstrings and in the Makefile is one that its program
accepts."""

import importlib
import re
import shlex
import sys

import pytest
from accelerate.commands.launch import launch_command_parser

import installed
import plan_memory
import rehearse
from core.cli import parse
from launching import REPO
from planner.plan import Request

PROGRAMS = [
    path
    for folder in ("recipes", "scripts")
    for path in sorted((REPO / folder).glob("*.py"))
    if re.search(r"def parse_args\(|class Arguments\(", path.read_text())
]
PARSERS = {str(path.relative_to(REPO)): importlib.import_module(path.stem) for path in PROGRAMS}
PARSERS["llama.py"] = PARSERS["recipes/llama.py"]  # a copy
PLAIN = {
    "python evidence/tables.py",
    """kill -USR1 $(grep -oP '"process": \\K[0-9]+' runs/full/status.json)""",
    "pip download -r requirements-dev.txt -d wheels",
    "cd my_project",
    "git pull",
    "python test_copy.py",  # of a copy
    "head -n 100 all.jsonl > held_out.jsonl && tail -n +101 all.jsonl > rows.jsonl",
    "source .venv/bin/activate",
    "pip install -r requirements.txt",
    "pip install liger-kernel",
    "pip install -r requirements-export.txt",
    "pip install -r requirements-llama-cpp.txt",
    "pip install s3fs",
    "pip install trackio",
    "trackio show --project llama",
    "tensorboard --logdir runs",
    "apt install g++",
    "python -m pytest -q tests/unit/core/test_cli.py",
    "kubectl apply -f clusters/trainjob.yaml",
}
CLUSTER_PROGRAMS = ("sbatch", "sky", "clusters/torchrun_elastic.sh")


DOCUMENTS = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "examples/README.md")),
    *sorted((REPO / "docs").glob("*.md")),
]
# In sentences. Left out are names of programs without arguments, and commands with a placeholder.
PLACEHOLDERS = ("...", "X", "yours")
INLINE = re.compile(
    r"(source|pip|apt|make|pytest|accelerate launch|python (scripts|recipes)/\w+\.py)\b ?"
)


def commands_of(text):
    """The commands of a document: of its blocks, and those in its sentences and tables."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = [code for code in re.findall(r"`([^`]+)`", prose) if is_command(code)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + inline
    return [
        re.sub(r"\s+#.*", "", line).strip()
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def is_command(code):
    found = INLINE.match(code)
    if not found or code == found[0].strip():
        return False
    return not any(word in code for word in PLACEHOLDERS)


def commands_of_documents():
    for path in DOCUMENTS:
        yield from commands_of(path.read_text())


def commands_of_docstrings():
    for name in sorted(PARSERS.keys() - {"llama.py"}):
        text = (REPO / name).read_text().split('"""')[1].replace("\\\n", " ")
        for line in text.splitlines():
            if re.match(r"    (python|accelerate) ", line) and "..." not in line:
                yield re.sub(r"\s+# .*", "", line).strip()


def commands_of_makefile():
    text = (REPO / "Makefile").read_text().replace("\\\n", " ")
    for name, default in re.findall(r"^(\w+) \?= ?(.*)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", default)
    for line in text.splitlines():
        found = re.search(
            r"\t(?:OMP_NUM_THREADS=\S+ )?((?:python scripts|accelerate launch).*)", line
        )
        if found:
            yield found[1]


COMMANDS = sorted({*commands_of_documents(), *commands_of_docstrings(), *commands_of_makefile()})


def parse_with(script, arguments, monkeypatch):
    program = PARSERS[script]
    if hasattr(program, "Arguments"):  # a recipe
        parse(program.Arguments, words=arguments)  # SystemExit if it refuses them
        return
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    program.parse_args()


def test_the_commands_were_found():
    assert len(COMMANDS) >= 50
    assert {"make quickstart", "make test", "make check", "make docs"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_is_accepted(command, monkeypatch):
    words = shlex.split(command)
    if command in PLAIN:
        return
    if words[0] == "export":
        check_variables(dict(word.split("=", 1) for word in words[1:]))
    elif words[0] in CLUSTER_PROGRAMS:
        check_cluster_command(words, monkeypatch)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPO / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pytest":
        assert all((REPO / word).exists() for word in words if "/" in word)
    elif "accelerate-recipes" in words:
        name, *arguments = words[words.index("accelerate-recipes") + 1 :]
        parse_with(f"scripts/{installed.COMMANDS[name]}.py", arguments, monkeypatch)
    elif words[0] == "python":
        assert words[1] == "llama.py" or (REPO / words[1]).is_file()
        parse_with(words[1], words[2:], monkeypatch)
        if words[1] == "scripts/rehearse.py":
            args = rehearse.parse_args()[1]
            assert (REPO / args.config_file).is_file()
            launch_command_parser().parse_args([*args.options, *args.words])
            parse_with(args.words[0], args.words[1:], monkeypatch)
        if words[1] == "scripts/plan_memory.py":
            Request(**plan_memory.parse_args()[0])
    else:
        assert words[:2] == ["accelerate", "launch"]
        args = launch_command_parser().parse_args(words[2:])
        assert args.quiet or (REPO / args.config_file).is_file()
        parse_with(args.training_script, args.training_script_args, monkeypatch)


def check_variables(variables):
    """What a command for a cluster names exists."""
    for name in {"RECIPE", "CONFIG"} & variables.keys():
        assert (REPO / variables[name]).is_file()


def check_cluster_command(words, monkeypatch):
    """The file exists, and what follows it are arguments of a recipe."""
    (place,) = [i for i, word in enumerate(words) if word.startswith("clusters/")]
    assert (REPO / words[place]).is_file()
    arguments = words[place + 1 :]
    if words[0] == "sky":
        variables = dict(word.split("=", 1) for word in arguments if "=" in word)
        check_variables(variables)
        arguments = variables["WORDS"].split()
    parse_with("recipes/llama.py", [word.replace("%a", "1") for word in arguments], monkeypatch)
