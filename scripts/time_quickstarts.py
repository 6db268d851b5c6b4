"""Run every quick example and note what it taught, and in which time, for README's table.

    python scripts/time_quickstarts.py --json results/quickstarts.json     # about ten minutes on two idle cores
    python scripts/time_quickstarts.py --recipes bert llama

Each is `make quickstart RECIPE=...` in the environment that runs this script, into a folder of its own. Before and
after are held-out numbers: what scripts/generate.py says of the model (exact match), or the first and the last
evaluation in metrics.jsonl. Seconds are those of the whole command, the installation of packages left out.

Exit codes: 0 done, 1 an example failed, 64 usage.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paths import ROOT
from proof.jobs import MAKERS
from usage import Parser

SHOWN = {
    "llama": "exact_match",
    "llama_dpo": "exact_match",
    "mistral_pretrain": "eval_perplexity",
    "mixtral": "exact_match",
    "t5": "eval_bleu",
    "bert": "eval_accuracy",
    "vit": "eval_accuracy",
}


def before_and_after(recipe, out):
    """The number of `SHOWN` before and after training, from what the example left in its folder."""
    if (out / "before.json").exists():
        return [
            json.loads((out / f"{name}.json").read_text())[SHOWN[recipe]]
            for name in ("before", "after")
        ]
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line[SHOWN[recipe]] for line in lines if SHOWN[recipe] in line]
    return [found[0], found[-1]]


def run(recipe, out):
    """Run one example into `out`. Returns its row, or ends this script with the tail of its output."""
    venv = Path(sys.prefix)
    (venv / ".installed").touch()  # this environment holds what the example would install
    start = time.monotonic()
    words = [
        "make",
        "-C",
        str(ROOT),
        "quickstart",
        f"RECIPE={recipe}",
        f"VENV={venv}",
        f"OUT={out}",
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{recipe}: the example ended with {done.returncode}: {done.stdout[-2000:]}")
    before, after = before_and_after(recipe, out)
    return {
        "recipe": recipe,
        "shown": SHOWN[recipe].removeprefix("eval_").replace("_", " "),
        "before": before,
        "after": after,
        "seconds": round(time.monotonic() - start, 1),
    }


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", nargs="+", choices=MAKERS, default=list(MAKERS), help="examples (default: all)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results here; other recipes there stay"
    )
    return parser.parse_args()


def main():
    args, rows = parse_args(), []
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(recipe, Path(folder) / "out"))
        told = "{recipe}: {shown} {before:.3g} before, {after:.3g} after, {seconds:.0f} s"
        print(told.format(**rows[-1]), flush=True)
    if args.json:
        there = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
        rows += [row for row in there if row["recipe"] not in args.recipes]
        rows.sort(key=lambda row: list(MAKERS).index(row["recipe"]))
        versions = {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "accelerate")
        }
        lines = ",\n".join(json.dumps(row) for row in rows)
        machine = f'"cores": {os.cpu_count()}, "versions": {json.dumps(versions)}'
        args.json.write_text(f'{{{machine}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
