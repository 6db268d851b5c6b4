# SPDX-License-Identifier: Apache-2.0
"""Fix a config by the edits of the findings on it, one finding after the other."""

import json
from dataclasses import dataclass, replace
from typing import Any

from components.config_files import ConfigFile, find_faults
from components.config_findings import Edit, Finding, MoveKey, RenameKey
from components.yaml_text import KeyPath
from configs.edits import CannotEditError, edit_content, edit_text

# A file with more findings is left to its author.
MAX_FINDINGS = 100
BY_HAND = "by hand, since --fix cannot edit this place of the text"


@dataclass(frozen=True)
class Fixed:
    """A file after the edits.

    Attributes:
        file: the fixed file; it is not written.
        done: the fixed findings, in the order in which they were fixed.
        left: the findings on the fixed file, except advice; the author must fix them.
    """

    file: ConfigFile
    done: list[Finding]
    left: list[Finding]


def fix(file: ConfigFile, num_processes: int | None = None, for_recipes: bool = False) -> Fixed:
    """Return a file with all edits that its findings, except advice, propose.

    The arguments are those of find_faults. A DeepSpeed JSON is only fixed as a file of its own.
    """
    done: list[Finding] = []
    by_hand: list[Finding] = []
    while True:
        findings, _ = find_faults(file, num_processes, for_recipes)
        findings = [item for item in findings if item.severity != "info"]
        fixable = [item for item in findings if is_fixable(item, file) and item not in by_hand]
        if not fixable or max(len(done), len(findings)) > MAX_FINDINGS:
            left = [with_hint(item) if item in by_hand else item for item in findings]
            return Fixed(file, done, left)
        chosen = names_first(fixable)
        try:
            file = with_edits(file, chosen)
        except CannotEditError:
            by_hand.append(chosen)
        else:
            done.append(chosen)


def with_edits(file: ConfigFile, item: Finding) -> ConfigFile:
    """Return a file with the edits of a finding made. Raises CannotEditError."""
    for edit in item.edits:
        file = edited(file, replace(edit, path=file.as_written(edit.path)))
    return file


def with_hint(item: Finding) -> Finding:
    """Return a finding, whose edits cannot be made, with what its author has to do."""
    return replace(item, fix=f"{item.fix}, {BY_HAND}", edits=())


def is_fixable(item: Finding, file: ConfigFile) -> bool:
    """Return whether a finding has edits of this file that overwrite nothing of its author's."""
    if not item.edits or (item.in_json and not file.is_deepspeed_json):
        return False
    return all(is_possible(edit, file.content) for edit in item.edits)


def is_possible(edit: Edit, content: dict) -> bool:
    """Return whether the sections that an edit changes are mappings, or missing."""
    paths = [edit.path, edit.new_path] if isinstance(edit, MoveKey) else [edit.path]
    return all(takes_keys(content, path[:-1]) for path in paths)


def takes_keys(content: Any, section: KeyPath) -> bool:
    """Return whether the section at a path is a mapping, or missing."""
    for key in section:
        if isinstance(content, dict):
            content = content.get(key, {})
    return isinstance(content, dict | None)


def names_first(fixable: list[Finding]) -> Finding:
    """Return the first finding, or the first wrong name: other edits need the right names."""
    for item in fixable:
        if len(item.edits) == 1 and isinstance(item.edits[0], RenameKey):
            return item
    return fixable[0]


def edited(file: ConfigFile, edit: Edit) -> ConfigFile:
    """Return a file with one edit made, in its content and in its text."""
    content = edit_content(file.content, edit)
    if file.path.suffix == ".json":
        text = json.dumps(content, indent=2) + "\n"
    else:
        text = edit_text(file.text, edit)
    fixed = replace(file, text=text, content=content)
    if file.is_deepspeed_json:
        fixed.deepspeed = fixed
    return fixed
