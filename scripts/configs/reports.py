# SPDX-License-Identifier: Apache-2.0
"""Everything that is reported about a config file: an object for programs, lines for people."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from components.config_files import ConfigFile, file_of, find_faults, load
from components.config_findings import STOPS, WISHES, Finding
from configs.comments import comments
from configs.description import describe
from configs.fixes import fix


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
    findings = as_objects(checked.findings, file)
    return {"file": path, "does": checked.does, "findings": findings}


def report_on_fixed(
    path: str,
    output: str | None = None,
    num_processes: int | None = None,
    for_recipes: bool = False,
) -> dict:
    """Write the fixed file to `output`, NAME.fixed.yaml by default, and return what --json prints.

    Nothing is written if there is nothing to fix, or if the file cannot be read.
    """
    try:
        file = load(path)
    except ValueError as error:
        return report_of_unreadable(path, error)
    fixed = fix(file, num_processes, for_recipes)
    written = None
    if fixed.done:
        target = Path(output) if output else name_of_fixed(file.path)
        write(target, fixed.file.text, newline_of(file.path))
        written = str(target)
    checked = check_file(fixed.file, num_processes, for_recipes)
    return {
        "file": path,
        "written": written,
        "does": checked.does,
        "comments_lost": comments_lost(file, fixed.file),
        "fixed": as_objects(fixed.done, file),
        "findings": as_objects(fixed.left, fixed.file),
    }


def name_of_fixed(path: Path) -> Path:
    """Return NAME.fixed.yaml for NAME.yaml."""
    return path.with_suffix(f".fixed{path.suffix}")


def newline_of(path: Path) -> str:
    """Return how the lines of a file end: as on Windows, or everywhere else."""
    return "\r\n" if b"\r\n" in path.read_bytes() else "\n"


def write(path: Path, text: str, newline: str) -> None:
    """Write a file with such ends of lines, and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline=newline)


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
        "fixable": False,
    }
    return {"file": path, "does": {}, "findings": [found]}


def comments_lost(before: ConfigFile, after: ConfigFile) -> list[str]:
    """Return the comments of a YAML that were deleted with their keys."""
    if before.path.suffix == ".json":
        return []
    lost = Counter(comments(before.text)) - Counter(comments(after.text))
    return list(lost.elements())


def as_objects(findings: list[Finding], file: ConfigFile) -> list[dict]:
    """Return the findings on a file as dicts."""
    return [as_object(item, file) for item in findings]


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
        "fixable": bool(item.edits),
    }


# ---- As lines ----
def show(report: dict) -> None:
    """Print what a file does, what was fixed, and each finding with its place and severity."""
    print(report.get("written") or report["file"])
    for aspect, words in report["does"].items():
        print(f"  {aspect:<12} {words}")
    for item in report.get("fixed", []):
        show_finding(item, "fixed", "now")
    for item in report["findings"]:
        is_wish = item["kind"] in WISHES and item["severity"] == "info"
        show_finding(item, item["severity"], "for the recipes" if is_wish else "fix")
    lost = report.get("comments_lost")
    if lost:
        print(f"{report['written']}: comments deleted with their keys: {'  '.join(lost)}")


def show_finding(item: dict, label: str, name_of_fix: str) -> None:
    """Print a finding in one or two lines."""
    place = item["file"]
    if item["line"]:
        place += f":{item['line']}"
    print(f"{place}: {label}: {item['key']}: {item['reason']}")
    if item["fix"]:
        print(f"    {name_of_fix}: {item['fix']}")
