# SPDX-License-Identifier: Apache-2.0
"""The reports of evidence/upstream/ are true of the libraries that are installed.

    pytest evidence/test_upstream.py --all      # ten minutes; run it after an upgrade of a library

What a script of a report prints is what its page quotes. Once a library is mended, this fails: the
workaround goes, and the page with it.
"""

import re
import sys
from pathlib import Path

import pytest

from job import output_of

SCRIPTS = sorted(Path(__file__).with_name("upstream").glob("*.py"))
SHORT = "accelerate_fsdp2_tp"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.whole] * (path.stem != SHORT))
        for path in SCRIPTS
    ],
)
def test_the_fault_is_still_there(script, tmp_path, record):
    code, output = output_of(["timeout", "300", sys.executable, script])
    lines = [line for line in output.splitlines() if re.match("(expected|got)[:,]", line)]
    page = script.with_suffix(".md").read_text()
    assert code == 0 and lines, output
    assert lines == re.search(r"```text\n(.*?)\n```", page, re.DOTALL)[1].splitlines()
    assert f"({script.stem}.md)" in script.with_name("README.md").read_text()
    record(printed=lines)
