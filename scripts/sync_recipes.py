"""Same name, same code: what two recipes have under one name is the same text in both, comments included.

    python scripts/sync_recipes.py --check
    python scripts/sync_recipes.py --fix --from recipes/llama.py   # copy what it has into the others

A recipe is copied alone into other people's projects, so recipes share no module; this check keeps what they repeat
equal: functions, classes and constants. To diverge, rename: the name then tells that it differs. Excepted is what
stands in `OWN`, each recipe's own. The banners of `main` are checked too: the same ones in the same order, so that who
knows one recipe knows all.

Exit codes: 0 all equal; 1 something differs, or with --fix something was copied; 64 usage.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

from usage import Parser

ROOT = Path(__file__).resolve().parents[1]
OWN = {"parse_args", "load_data", "main"}
BANNERS = (
    "Accelerator and seed",
    "Tokenizer and data",
    "Model",
    "Optimizer and schedule",
    "Prepare",
    "Resume",
    "Train",
    "Evaluate and save",
)
DIFFERS = 1


def recipes_in(folder):
    """The files that have a `main`; what lies beside them for all recipes has none."""
    return [
        path
        for path in sorted(folder.glob("*.py"))
        if re.search(r"^def main\(", path.read_text(), re.MULTILINE)
    ]


def parts_of(text):
    """{name: (first line, line behind)} of functions, classes and constants, from 0, with the comments right above."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else []
        if isinstance(node, ast.Assign):
            names = [
                target.id
                for target in node.targets
                if isinstance(target, ast.Name) and target.id.isupper()
            ]
        start = (
            min(
                [
                    node.lineno,
                    *(decorator.lineno for decorator in getattr(node, "decorator_list", [])),
                ]
            )
            - 1
        )
        while start and lines[start - 1].startswith("#"):
            start -= 1
        found |= {name: (start, node.end_lineno) for name in names}
    return found


def shared_text(text):
    """{name: source} of what must be equal wherever it occurs."""
    lines = text.splitlines()
    return {
        name: "\n".join(lines[start:end])
        for name, (start, end) in parts_of(text).items()
        if name not in OWN
    }


def banners_of(text):
    """The banners of `main`, in order."""
    start, end = parts_of(text)["main"]
    return re.findall(
        r"^    # ---- (.*?) ----$", "\n".join(text.splitlines()[start:end]), re.MULTILINE
    )


def differences(texts):
    """Lines for the user on what differs. texts: {path: source}. [] if nothing does."""
    found, first = [], {}
    for path, text in texts.items():
        for name, source in shared_text(text).items():
            other, known = first.setdefault(name, (path, source))
            if source != known:
                found.append(
                    f"{name} of {path} is not that of {other}: {first_difference(source, known)}"
                )
        if banners_of(text) != list(BANNERS):
            found.append(
                f"main of {path} has the banners {', '.join(banners_of(text))}, not {', '.join(BANNERS)}"
            )
    return found


def first_difference(source, other):
    """The first line of two texts that differs, from both."""
    pairs = zip([*source.splitlines(), ""], [*other.splitlines(), ""], strict=False)
    mine, theirs = next((mine, theirs) for mine, theirs in pairs if mine != theirs)
    return f"{mine.strip()!r} instead of {theirs.strip()!r}"


def fixed(text, source):
    """The text with every part that `source`, another recipe, has too as it is there."""
    wanted, lines = shared_text(source), text.splitlines()
    for name, (start, end) in sorted(parts_of(text).items(), key=lambda part: -part[1][0]):
        if name in wanted:
            lines[start:end] = wanted[name].splitlines()
    return "\n".join(lines) + "\n"


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say what differs")
    action.add_argument(
        "--fix", action="store_true", help="write what --from has into the other recipes"
    )
    parser.add_argument(
        "--from", dest="source", metavar="recipes/X.py", help="the recipe that is right"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "recipes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fix and (
        not args.source or Path(args.source).resolve() not in recipes_in(args.folder.resolve())
    ):
        parser.error("--fix needs --from and a recipe: which of those that differ is right?")
    return args


def main():
    args = parse_args()
    texts = {path: path.read_text() for path in recipes_in(args.folder.resolve())}
    if args.fix:
        source = texts[Path(args.source).resolve()]
        for path, text in texts.items():
            if fixed(text, source) != text:
                path.write_text(fixed(text, source))
                print(f"{path.name} has now what {Path(args.source).name} has")
        texts = {path: path.read_text() for path in texts}
    problems = differences({path.name: text for path, text in texts.items()})
    print("\n".join(problems) or f"{len(texts)} recipes: same name, same code")
    sys.exit(DIFFERS if problems else 0)


if __name__ == "__main__":
    main()
