# SPDX-License-Identifier: Apache-2.0
"""Fix a config by the edits of the findings on it, one finding after the other."""

import json
from dataclasses import dataclass, replace
from typing import Any

from components.config_files import ConfigFile, find_faults
from components.config_findings import Edit, Finding, RenameKey
from configs.edits import edit_content, edit_text

# A file with more findings is left to its author.
MAX_FINDINGS = 100


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
    done = []
    while True:
        findings, _ = find_faults(file, num_processes, for_recipes)
        findings = [item for item in findings if item.severity != "info"]
        fixable = [item for item in findings if is_fixable(item, file)]
        if not fixable or max(len(done), len(findings)) > MAX_FINDINGS:
            return Fixed(file, done, findings)
        chosen = names_first(fixable)
        for edit in chosen.edits:
            file = edited(file, edit)
        done.append(chosen)


def is_fixable(item: Finding, file: ConfigFile) -> bool:
    """Return whether a finding has edits of this file that overwrite nothing of its author's."""
    if not item.edits or (item.in_json and not file.is_deepspeed_json):
        return False
    return all(is_possible(edit, file.content) for edit in item.edits)


def is_possible(edit: Edit, content: Any) -> bool:
    """Return whether the sections of an edit are mappings, or missing."""
    for key in edit.path[:-1]:
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
