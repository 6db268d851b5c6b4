# SPDX-License-Identifier: Apache-2.0
"""How much there is to read, beside the most that there may be.

What a copied recipe brings is what a reader has to trust, so that the closure of a recipe counts
and not the length of a file; test_density.py sees that no budget is met by denser lines. A commit
that raises a number changes nothing else and says why; `pytest -s` prints the table.
"""

from launching import REPO
from template.copying import modules_needed

RECIPES = sorted((REPO / "recipes").glob("*.py"))
# Lines of Python at most; each issue of the rewrite lowers them to its own
BUDGETS = {
    "llama.py with all that it imports": 10_257,
    "files of it": 53,
    "the largest recipe with all that it imports": 10_319,
    "the longest recipe": 470,
    "recipes/*.py": 4_679,
    "a recipe and its maker, on average": 420,
    "recipes/core": 7_409,
    "recipes/tasks": 3_103,
    # The aims were 7,800, 5,300 and, for nine of the fourteen recipes, 15,500
    "scripts": 7_832,
    "programs at the top of scripts": 12,
    "evidence": 5_294,
    "tests": 19_139,
}


def lines_of(paths):
    return sum(path.read_bytes().count(b"\n") for path in paths)


def files_counted():
    """{budget: the files whose lines it bounds}"""
    closures = {path.name: [path, *modules_needed(path)] for path in RECIPES}
    counted = {
        "llama.py with all that it imports": closures["llama.py"],
        "the largest recipe with all that it imports": max(closures.values(), key=lines_of),
    }
    for folder in ("recipes/core", "recipes/tasks", "scripts", "evidence", "tests"):
        counted[folder] = sorted((REPO / folder).rglob("*.py"))
    # What a recipe adds is bounded for each, however many there are
    names = {path.name for path in RECIPES}
    makers = [path for path in counted["scripts"] if path.parent.name == "tiny"]
    own = [path for path in makers if path.name in names]
    counted["scripts"] = [path for path in counted["scripts"] if path not in own]
    counted["recipes and their makers"] = [*RECIPES, *own]
    return counted


def test_nothing_is_larger_than_its_budget():
    counted = files_counted()
    found = {name: lines_of(paths) for name, paths in counted.items()}
    of_recipes = found.pop("recipes and their makers")
    found["a recipe and its maker, on average"] = of_recipes // len(RECIPES)
    found["the longest recipe"] = max(lines_of([path]) for path in RECIPES)
    found["recipes/*.py"] = lines_of(RECIPES)
    found["files of it"] = len(counted["llama.py with all that it imports"])
    programs = [path for path in (REPO / "scripts").glob("*.py") if is_program(path)]
    found["programs at the top of scripts"] = len(programs)
    for name, budget in BUDGETS.items():
        print(f"{name:45} {found[name]:7,} of {budget:7,}")
    too_large = {name for name, budget in BUDGETS.items() if found[name] > budget}
    assert not too_large, {name: (found[name], BUDGETS[name]) for name in too_large}


def is_program(path):
    return '__name__ == "__main__"' in path.read_text()
