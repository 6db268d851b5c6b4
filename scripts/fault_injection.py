# SPDX-License-Identifier: Apache-2.0
"""Fault injection: no run can be lost, whatever is stopped, killed, cut short or damaged.

    python scripts/fault_injection.py                        # all groups: more than three hours
    python scripts/fault_injection.py --groups resume signals --limit 2  # some; --list names all
    python scripts/fault_injection.py --groups --report docs/fault_injection.md  # what --json has

Each trial is the shipped recipe on the job of scripts/parity.py (20 steps over two epochs, 12 rows
per step, 18 steps per epoch) with faults planted by scripts/proof/faults.py, on CPU ranks under the
shipped YAML files. It is compared with the same job without a fault. "Equal" means bit for bit:
every line of metrics.jsonl, except for speed and memory, and every final weight. The results of a
group are written to --json when it is done. They replace older results of that group, or with
--only, of the same trials.

Exit codes: 0 all trials are as promised, 1 one is not, 64 usage.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from proof.trials.groups import GROUPS, trials_of
from proof.trials.lab import Lab
from proof.trials.random_kills import KILLS
from proof.trials.report import report, summary
from proof.trials.running import attempt, line_of, spread, with_earlier
from proof.trials.trial import Trial
from usage import Parser

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups",
        nargs="*",
        choices=GROUPS,
        default=list(GROUPS),
        metavar="GROUP",
        help=f"groups of trials to run (default: all): {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="trials whose lines in --list match"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="run at most this many trials of each kind (0: all)"
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, help="kill -9 trials at random moments [%(default)s]"
    )
    parser.add_argument("--list", action="store_true", help="print the trials and stop")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="trials at a time; with more than one the measured seconds are unreliable",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/fault_injection"), help="folder of all runs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("results/fault_injection.json"),
        help="file of the results [%(default)s]",
    )
    parser.add_argument(
        "--report", type=Path, metavar="PATH.md", help="write the table of all results here"
    )
    args = parser.parse_args()
    if args.jobs < 1 or args.limit < 0 or args.kills < 0:
        parser.error("--jobs must be at least 1, --limit and --kills 0 or more")
    return args


def plan(args: argparse.Namespace) -> dict[str, list[Trial]]:
    """Return the chosen trials by group, without the groups in which --only matches none."""
    planned = {}
    for group in args.groups:
        trials = trials_of(group, args.kills)
        chosen = [trial for trial in trials if re.search(args.only, line_of(group, trial))]
        if chosen or not args.only:
            planned[group] = spread(chosen, args.limit)
    return planned


def facts_of_now() -> dict:
    """Return when, where and with which versions the trials are run."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"CPU, {os.cpu_count()} cores",
        "command": f"python {shlex.join(sys.argv)}",
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def do_all(args: argparse.Namespace, planned: dict[str, list[Trial]], results: dict) -> None:
    """Run the planned trials, and write the results after each group."""
    facts = facts_of_now()
    lab = Lab(args.output_dir)
    for group, trials in planned.items():
        with ThreadPoolExecutor(args.jobs) as pool:
            done = list(pool.map(partial(attempt, lab, group), range(len(trials)), trials))
        before = results.get(group, {}) if args.only else {}
        results[group] = with_earlier(facts, done, before, trials_of(group, args.kills))
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(in_order(results), indent=1))


def in_order(results: dict) -> dict:
    """Return the results in the order of GROUPS."""
    return {group: results[group] for group in GROUPS if group in results}


def main() -> None:
    """Run the chosen trials; print and write the results of all."""
    args = parse_args()
    planned = plan(args)
    if args.list:
        for group, trials in planned.items():
            for trial in trials:
                print(line_of(group, trial))
        return
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    if planned:
        do_all(args, planned, results)
    print(summary(results))
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report(in_order(results)))
    for group in planned or results:
        if not all(trial["ok"] for trial in results[group]["trials"]):
            sys.exit(1)


if __name__ == "__main__":
    main()
