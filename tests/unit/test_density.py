# SPDX-License-Identifier: Apache-2.0
"""The code of recipes and scripts is no denser than that of the projects it is measured by.

tests/density.py has the rules, their bounds, and what those projects have. tests/ is not held to
them yet: some of its files have tables of cases that are to be rewritten.
"""

from density import findings
from launching import REPO


def test_recipes_and_scripts_keep_to_each_rule():
    found = []
    for folder in ("recipes", "scripts"):
        for path in sorted((REPO / folder).rglob("*.py")):
            found += findings(str(path.relative_to(REPO)), path.read_text())
    assert found == []


def test_a_rule_finds_what_is_planted():
    text = "x = 1 if a else 2 if b else 3\nx or stop()\ny = 3 * (a > b)\n"
    assert len(list(findings("planted.py", text))) == 3
