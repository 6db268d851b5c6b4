# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own tasks by name, and tasks in YAML files, with the data that they are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from exits import Exit, first_line, stop

YAML = (".yaml", ".yml")
SHOWN = 5  # names that are near to an unknown one
# What datasets makes of files; another dataset_path that is no folder is a data set of the hub
READERS = ("json", "csv", "parquet", "arrow", "text", "pandas", "xml", "webdataset")


@dataclass
class Loaded:
    """Tasks with their data, as lm-eval's TaskManager.load returns them."""

    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    group_map: dict[str, list[str]] = field(default_factory=dict)

    def add(self, loaded: Any) -> None:
        """Add what the TaskManager loaded of one name."""
        self.tasks |= loaded["tasks"]
        self.groups |= loaded["groups"]
        self.group_map |= loaded["group_map"]


def load_tasks(
    words: str, include_path: Path | None, may_run_code: bool, num_fewshot: int | None
) -> Loaded:
    """Return the tasks that a command line names.

    Ends with 64 for an unknown or unsafe task, with 65 for one whose files are bad, and with 69
    for one whose data is on the hub, if that cannot be reached.

    Args:
        words: names, patterns such as mmlu_*, or YAML files, separated by commas.
        include_path: a folder with more task files.
        may_run_code: whether tasks that run code which a model wrote are allowed.
        num_fewshot: examples in a prompt; None for as many as each task says.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    manager = TaskManager(include_path=include_path, include_defaults=needs_index(names))
    found: list[str] = []
    for name in names:
        found += find_names(name, manager)
    loaded = Loaded()
    for name in found:
        if not may_run_code:
            refuse_unsafe(name, manager)
        loaded.add(load_task(name, manager))
    for task in loaded.tasks.values():
        set_examples(task, num_fewshot)
    return loaded


def needs_index(names: Sequence[str]) -> bool:
    """Return whether lm-eval has to look through its own task files, which takes seconds.

    A file of one task stands for itself; one of a group names others.
    """
    for name in names:
        if not is_file(name) or "group" in read_file(Path(name)):
            return True
    return False


def is_file(name: str) -> bool:
    """Return whether a name means a YAML file."""
    return name.endswith(YAML)


def read_file(path: Path) -> dict[str, Any]:
    """Return a YAML file of a task, with the files that it includes, and run nothing of it.

    Raises SystemExit with 64 if there is none, with 65 if it is not YAML of a task.
    """
    if not path.is_file():
        stop(Exit.USAGE, f"--tasks {path}: no such file")
    try:
        config = load_yaml(path, resolve_func=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        stop(Exit.DATA, f"{place}: not YAML: {getattr(error, 'problem', error)}")
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{path}: {first_line(error)}")
    if not {"task", "group"} & config.keys():
        stop(Exit.DATA, f"{path}: has neither a task nor a group, which would be its name")
    return config


def find_names(name: str, manager: TaskManager) -> list[str]:
    """Return the names that a name or a pattern stands for; end with 64 if there are none."""
    if is_file(name):
        return [name]
    found = manager.match_tasks([name])
    if not found:
        near = get_close_matches(name, manager.all_tasks, n=SHOWN, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
        stop(Exit.USAGE, f"--tasks {name}: lm-eval has no such task; {hint}")
    return found


def refuse_unsafe(name: str, manager: TaskManager) -> None:
    """End with 64 if a task runs code that a model wrote, before any of its own code is imported.

    Such tasks load what runs the code from the hub as soon as they are loaded.
    """
    for config in configs_of(name, manager):
        if config.get("unsafe_code"):
            fix = "pass --confirm_run_unsafe_code if nothing on this machine can be harmed"
            task = config.get("task", name)
            stop(Exit.USAGE, f"--tasks {name}: {task} runs code that the model writes; {fix}")


def configs_of(name: str, manager: TaskManager) -> Iterator[dict[str, Any]]:
    """Yield the settings of a task, or of all tasks of a group or a tag."""
    if is_file(name):
        config = read_file(Path(name))
        members = config.get("task")
    else:
        entry = manager.task_index[name]
        config = entry.cfg or {}
        members = config.get("task", sorted(entry.tags)) if config else sorted(entry.tags)
    yield config
    if isinstance(members, list):
        for member in members:
            yield from configs_of_member(member, manager)


def configs_of_member(member: Any, manager: TaskManager) -> Iterator[dict[str, Any]]:
    """Yield the settings of a member of a group: a name, or the settings themselves."""
    if isinstance(member, dict):
        yield member
        for name in (member.get("task"), member.get("group")):
            if isinstance(name, list):
                for inner in name:
                    yield from configs_of_member(inner, manager)
            elif name in manager.task_index:
                yield from configs_of(name, manager)
    elif member in manager.task_index:
        yield from configs_of(member, manager)


def refuse_without_data(name: str, reason: str) -> NoReturn:
    """End with 69 and the reason why the data of a task does not come from the hub."""
    fix = "for rows of your own, docs/evaluate.md has a task file that needs no hub"
    stop(Exit.NO_HUB, f"--tasks {name}: no data from the hub: {reason}; {fix}")


def load_task(name: str, manager: TaskManager) -> Any:
    """Return a task or a group with its data."""
    try:
        return manager.load([name])
    except ModuleNotFoundError as error:
        stop(Exit.USAGE, f"--tasks {name}: needs the package {error.name}: pip install it")
    except Exception as error:  # a task file is a program, and may fail in any way
        if any(paths_on_hub(name, manager)):
            refuse_without_data(name, first_line(error))
        stop(Exit.DATA, f"--tasks {name}: cannot be loaded: {first_line(error)}")


def paths_on_hub(name: str, manager: TaskManager) -> Iterator[str]:
    """Yield the ids of the data sets of a task that are on the hub."""
    for config in configs_of(name, manager):
        path = config.get("dataset_path")
        if isinstance(path, str) and path not in READERS and not Path(path).exists():
            yield path


def set_examples(task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples in a prompt as lm-eval does: a 0 of the task's own stays."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
