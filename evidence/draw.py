# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of README.md and docs/ as SVG, for light and dark pages.

    python evidence/draw.py                   # all of them, into docs/pictures/
    python evidence/draw.py memory speed      # some of them; --list names all
    python evidence/draw.py --output_dir /tmp/pictures

Each picture is written as NAME_light.svg and NAME_dark.svg. The numbers come from results/, the
memory of `memory` from the planner; evidence/record_curves.py records the runs of the loss curves.
Drawn again from the same numbers, a file is the same byte for byte.

Exit codes: 0 done, 64 usage, 65 a recording is missing, 73 cannot write.
"""

import argparse
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import Exit, run_command, stop
from paths import ROOT
from usage import Parser

NAMES = (
    "memory",
    "parity",
    "agreement",
    "resume",
    "what_is_split",
    "which_yaml",
    "quickstart_terminal",
    "quickstart_curve",
    "comparison",
    "speed",
    "pipeline",
    "meshes",
)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=ROOT / "docs" / "pictures",
        help="folder to write to (default: docs/pictures)",
    )
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            parser.error(f"{name}: no such picture; choose from {', '.join(NAMES)}")
    return args


def main() -> None:
    """Draw the chosen pictures under both themes."""
    args = parse_args()
    if args.list:
        print("\n".join(NAMES))
        return
    # Imported here, since it takes seconds and a wrong call should be refused at once.
    from pictures.catalog import draw
    from pictures.recordings import NotRecordedError
    from pictures.style import THEMES

    missing = []
    for name in args.names or NAMES:
        try:
            texts = {theme.name: draw(name, theme) for theme in THEMES}
        except NotRecordedError as error:
            missing.append(f"{name}: {error}")
            continue
        for theme, text in texts.items():
            write(args.output_dir / f"{name}_{theme}.svg", text)
    if missing:
        stop(Exit.DATA, "; ".join(missing))


def write(path: Path, text: str) -> None:
    """Write a picture and print its path; exit with 73 if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror or error}")
    print(path)


if __name__ == "__main__":
    run_command(main)
