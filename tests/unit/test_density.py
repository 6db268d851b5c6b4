# SPDX-License-Identifier: Apache-2.0
"""The code of recipes and scripts is no denser than that of the projects it is measured by.

tests/density.py has the rules, their bounds, and what those projects have. tests/ is not held to
them yet: some of its files have tables of cases that are to be rewritten.
"""

import pytest

import density
from density import (
    FEWEST_STATEMENTS,
    MOST_NODES,
    NODES,
    RULES,
    TERNARIES,
    TUPLE_ASSIGNMENTS,
    read_code,
)
from launching import REPO

PLAIN = "x = 1\n"
TERNARY = "x = 1 if y else 2\n"
PAIR = "x, y = a, b\n"


def sum_of(number):
    """A statement of twice as many nodes as there are names in it, and two more of its target."""
    return f"x = {' + '.join(['a'] * number)}\n"


def findings(rule, text):
    return list(rule(read_code("planted.py", text)))


def test_recipes_and_scripts_keep_to_each_rule():
    found = []
    for folder in ("recipes", "scripts"):
        for path in sorted((REPO / folder).rglob("*.py")):
            code = read_code(str(path.relative_to(REPO)), path.read_text())
            for rule in RULES:
                found += rule(code)
    assert found == []


PLANTED = {  # (what is found, what is as near as it can be and is not)
    "dense_statements": (sum_of(NODES), PLAIN * 9 + sum_of(NODES)),
    "large_statements": (sum_of(MOST_NODES // 2), sum_of(MOST_NODES // 2 - 1)),
    "many_ternaries": (
        TERNARY * (TERNARIES // 10 + 1),
        PLAIN * 2 * FEWEST_STATEMENTS + TERNARY * (TERNARIES // 10 + 1),
    ),
    "nested_ternaries": ("x = 1 if a else 2 if b else 3\n", TERNARY * 2),
    "many_tuple_assignments": (
        PAIR * (TUPLE_ASSIGNMENTS // 10 + 1),
        PAIR + "x, y = pair\n" + "x = a, b\n",
    ),
    "arithmetic_with_truth": ("x = 3 * (a > b)\n", "x = 3 * a if a > b else 0\n"),
    "hidden_lambdas": ("x, y = 1, lambda: 2\n", "x = sorted(y, key=lambda a: -a)\n"),
    "conditions_as_statements": ("x or stop()\n", "if not x:\n    stop()\n"),
    "unformatted_code": ("x = [1,2]  # fmt: skip\n", "x = [1, 2]  # a list\n"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_finds_what_is_planted_and_nothing_near_it(name):
    bad, good = PLANTED[name]
    assert findings(getattr(density, name), bad)
    assert findings(getattr(density, name), good) == []


def test_each_rule_has_something_planted_for_it():
    assert [rule.__name__ for rule in RULES] == list(PLANTED)
