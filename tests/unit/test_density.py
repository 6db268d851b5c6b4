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
    STATEMENTS,
    TERNARIES,
    TUPLE_ASSIGNMENTS,
    WIDTH,
    read_code,
)
from launching import REPO

PLAIN = "x = 1\n"
TERNARY = "x = 1 if y else 2\n"
PAIR = "x, y = a, b\n"


def lines(*statements):
    return "\n".join(statements) + "\n"


def sum_of(number):
    """A statement of twice as many nodes as there are names in it, and two more of its target."""
    return f"x = {' + '.join(['a'] * number)}\n"


def function_of(number):
    return lines("def f():", *["    a = 1"] * number)


@pytest.fixture(scope="module")
def found_in_project():
    """{name of a rule: what it finds in recipes and scripts}, of one reading of each file."""
    found = {rule.__name__: [] for rule in RULES}
    for folder in ("recipes", "scripts"):
        for path in sorted((REPO / folder).rglob("*.py")):
            code = read_code(str(path.relative_to(REPO)), path.read_text())
            for rule in RULES:
                found[rule.__name__] += rule(code)
    return found


def findings(rule, text):
    return list(rule(read_code("planted.py", text)))


@pytest.mark.parametrize("name", [rule.__name__ for rule in RULES])
def test_recipes_and_scripts_keep_to_each_rule(name, found_in_project):
    assert found_in_project[name] == []


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
    "conditions_as_statements": ("x or stop()\n", lines("if not x:", "    stop()")),
    "long_functions": (function_of(STATEMENTS + 1), function_of(STATEMENTS)),
    "wide_lines": (f"# {'a' * (WIDTH - 1)}\n", f"# {'a' * (WIDTH - 2)}\n"),
    "unformatted_code": ("x = [1,2]  # fmt: skip\n", "x = [1, 2]  # a list\n"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_finds_what_is_planted_and_nothing_near_it(name):
    bad, good = PLANTED[name]
    assert findings(getattr(density, name), bad)
    assert findings(getattr(density, name), good) == []


def test_each_rule_has_something_planted_for_it():
    assert [rule.__name__ for rule in RULES] == list(PLANTED)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("x = 1", [3]),
        ("x = {'a': 1, 'b': [2]}", [7]),  # not all of it is constants
        ("x = {'a': 1, 'b': 2}", [3]),  # a table is one node, however long it is
        ("'''A docstring.'''", []),
        ("if a == 1:\n    b = 2", [3, 3]),
        ("for a in b:\n    pass", [1, 1]),
        ("with a, b:\n    pass", [2, 2]),
    ],
)
def test_a_statement_is_as_large_as_its_syntax_tree(text, sizes):
    assert [size for _, size in read_code("planted.py", text).sizes] == sizes
