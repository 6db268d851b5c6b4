# SPDX-License-Identifier: Apache-2.0
"""Everything that is reported about a config file: an object for programs, lines for people."""

from dataclasses import dataclass

from components.config_files import ConfigFile, file_of, find_faults, load
from components.config_findings import STOPS, WISHES, Finding
from configs.description import describe


@dataclass(frozen=True)
class Checked:
    """The result of checking a file.

    Attributes:
        findings: what is wrong with it, worst first.
        does: what it does, as {aspect: words}.
    """

    findings: list[Finding]
    does: dict[str, str]


def check_file(
    file: ConfigFile, num_processes: int | None = None, for_recipes: bool = False
) -> Checked:
    """Return what is wrong with a file and what it does; the arguments are those of find_faults."""
    findings, config = find_faults(file, num_processes, for_recipes)
    content = file.content
    if file.is_deepspeed_json:
        content = {"deepspeed_config": {}}
    deepspeed = file.deepspeed.content if file.deepspeed else None
    return Checked(findings, describe(content, config, findings, deepspeed, for_recipes))


# ---- As objects ----
def report_on(path: str, num_processes: int | None = None, for_recipes: bool = False) -> dict:
    """Return what --json prints about a file."""
    try:
        file = load(path)
    except ValueError as error:
        return report_of_unreadable(path, error)
    checked = check_file(file, num_processes, for_recipes)
    findings = [as_object(item, file) for item in checked.findings]
    return {"file": path, "does": checked.does, "findings": findings}


def report_of_unreadable(path: str, error: ValueError) -> dict:
    """Return the report on a file that is not a config."""
    found = {
        "severity": "error",
        "kind": STOPS,
        "file": path,
        "line": None,
        "key": "file",
        "reason": str(error),
        "fix": "",
    }
    return {"file": path, "does": {}, "findings": [found]}


def as_object(item: Finding, file: ConfigFile) -> dict:
    """Return a finding as a dict, with its file and line."""
    file = file_of(item, file)
    return {
        "severity": item.severity,
        "kind": item.kind,
        "file": str(file.path),
        "line": file.line_of(item.path),
        "key": item.dotted_path,
        "reason": item.reason,
        "fix": item.fix,
    }


# ---- As lines ----
def show(report: dict) -> None:
    """Print what a file does, and each finding with its place and severity."""
    print(report["file"])
    for aspect, words in report["does"].items():
        print(f"  {aspect:<12} {words}")
    for item in report["findings"]:
        place = item["file"]
        if item["line"]:
            place += f":{item['line']}"
        print(f"{place}: {item['severity']}: {item['key']}: {item['reason']}")
        if item["fix"]:
            is_wish = item["kind"] in WISHES and item["severity"] == "info"
            print(f"    {'for the recipes' if is_wish else 'fix'}: {item['fix']}")
