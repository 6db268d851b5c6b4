# SPDX-License-Identifier: Apache-2.0
"""The reports of evidence/upstream are true of the libraries that are installed."""

import os
import re
import signal
import subprocess
import sys

import pytest

from launching import REPO

FOLDER = REPO / "docs" / "upstream"
SCRIPTS = sorted(FOLDER.glob("*.py"))
MOST_LINES = 40
SECONDS = 240  # a script takes 10 to 30 on two idle cores


def printed_by(script, folder):
    """The lines of a script's output that say what is expected and what it got."""
    command = [sys.executable, str(script)]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        raise
    assert process.returncode == 0
    return [line for line in output.splitlines() if re.match("(expected|got)[:,]", line)]


def is_mended(lines):
    """Whether each result is what the line before it, of what is expected, allows."""
    expected = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name.startswith("expected"):
            expected = value
        elif value not in expected.split(" or "):
            return False
    return True


def shown_on(page):
    """The output that a page quotes."""
    return re.search(r"```text\n(.*?)\n```", page.read_text(), re.DOTALL)[1].splitlines()


@pytest.mark.cold("the scripts are run as a maintainer of the library would")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_fault_is_still_there(script, tmp_path):
    lines = printed_by(script, tmp_path)
    assert lines, "the script printed no result"
    assert not is_mended(lines), f"mended upstream: remove the workaround and {script.stem}.md"
    assert lines == shown_on(script.with_suffix(".md"))


def test_each_script_has_a_page_and_each_page_a_script():
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == {path.stem for path in SCRIPTS} != set()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short(script):
    assert len(script.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_index_leads_to_each_report(script):
    assert f"({script.stem}.md)" in (FOLDER / "README.md").read_text()


def test_a_repaired_library_is_told_from_a_faulty_one():
    assert is_mended(["expected: 1.0 or ValueError", "got: ValueError"])
    assert is_mended(["expected, one process: 2.0", "got, ZeRO-1: 2.0", "got, ZeRO-2: 2.0"])
    assert not is_mended(["expected, one process: 2.0", "got, ZeRO-1: 2.0", "got, ZeRO-2: 4.0"])
