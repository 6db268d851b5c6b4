#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Show what of a run's folder would be pushed to the hub, and push it: private by default.

    python scripts/push.py runs/lora owner/name           # shows, and asks on a terminal
    python scripts/push.py runs/lora owner/name --yes     # pushes to a private repository
    python scripts/push.py runs/lora owner/name --base_model owner/base --yes

Checkpoints, logs, answers, caches and unfinished files stay here. --base_model is the hub id of the
base; it replaces the path of a base on this machine in the pushed copy only. A push that was cut is
run again with the same command.

Exit codes: 0 done, 64 usage, 65 data, 69 hub.
"""

import argparse
from pathlib import Path

from common import Parser, run_command


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="output folder of a finished run, or of a merge")
    add("repo_id", help="owner/name, or a name of your own")
    add("--public", action="store_true", help="let everyone see a new repository")
    add("--revision", help="branch to push to, which must exist [main]")
    add("--commit_message", default="Upload model", help="message of the commit [%(default)s]")
    add("--base_model", help="hub id of the base, in place of a path on this machine")
    add("--yes", action="store_true", help="push without asking")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Imported here since it takes time: a wrong flag and --help are answered at once
    from publishing.session import run

    run(args)


if __name__ == "__main__":
    run_command(main)
