# SPDX-License-Identifier: Apache-2.0
"""What fault_injection.py does with its command line: choose trials, run them, report them."""

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

from proof.trials.groups import GROUPS, trials_of
from proof.trials.lab import Lab
from proof.trials.report import report, summary
from proof.trials.running import attempt, line_of, spread, with_earlier
from proof.trials.trial import Trial

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")


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


def run(args: argparse.Namespace) -> int:
    """Run the chosen trials; print and write the results of all. Return the exit code."""
    planned = plan(args)
    if args.list:
        for group, trials in planned.items():
            for trial in trials:
                print(line_of(group, trial))
        return 0
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    if planned:
        do_all(args, planned, results)
    print(summary(results))
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report(in_order(results)))
    for group in planned or results:
        if not all(trial["ok"] for trial in results[group]["trials"]):
            return 1
    return 0
