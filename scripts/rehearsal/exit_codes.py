# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a rehearsal and scripts/rehearse.py agree on one exit code.

A launcher turns every failure into 1 and a traceback. Each rank therefore records its code in a
file of a shared folder. If all ranks agree on a code that is not a crash, they end with 0 for the
launcher, and the rehearsal ends with that code. A rank that fails in another way ends with its real
code, which makes the launcher stop the other ranks.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

# The codes of core.exits, whose names cannot be imported here: in each rank the recipe has to
# find its own modules, which a copy has beside it.
# Done, usage, data, no hub, not finite, cannot write, stopped and saved, differs
CLEAN_EXITS = (0, 64, 65, 69, 70, 73, 75, 76)
REFUSALS = (64, 65, 69)  # usage, data, no hub: one rank's word is enough
FAILED = 1
NOT_AS_PROMISED = 78  # EX_CONFIG of sysexits.h: no recipe ends with it
# Seconds for the other ranks to reach the same end: after a success, and after anything else
PATIENCE = 20
PATIENCE_AFTER_FAILURE = 2


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code for a process that ends with this exception; print its message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return FAILED


@dataclass(frozen=True)
class Rank:
    """One rank, and the folder in which the ranks of its machine leave process id and exit code."""

    folder: Path
    number: int
    ranks_here: int

    def record_process(self, process: int) -> None:
        """Let rehearse.py know where to send signals."""
        (self.folder / f"pid.{self.number}").write_text(str(process))

    def agree(self, code: int) -> int:
        """Record how this rank ends, and return the code to end it with."""
        if not self.folder.is_dir():  # The rehearsal has ended before its ranks.
            return code
        (self.folder / f"exit.{self.number}").write_text(str(code))
        if code not in CLEAN_EXITS:
            return code
        patience = PATIENCE_AFTER_FAILURE if code else PATIENCE
        deadline = time.monotonic() + patience
        codes = []
        while not self.are_complete(codes) and time.monotonic() < deadline:
            codes = recorded_codes(self.folder)
            time.sleep(0.05)
        return 0 if codes == [str(code)] * self.ranks_here else code

    def are_complete(self, codes: list[str]) -> bool:
        """Return whether every rank here has written its code, not only made the file."""
        return len(codes) == self.ranks_here and "" not in codes


def recorded_codes(folder: Path) -> list[str]:
    """Return the codes that ranks have recorded so far; "" for one that is being written."""
    return [path.read_text() for path in folder.glob("exit.*")]


def refusal(folder: Path) -> int | None:
    """Return the code with which a rank refused to run, or None."""
    for code in recorded_codes(folder):
        if code and int(code) in REFUSALS:
            return int(code)
    return None


def recipe_exit_code(launcher_code: int, folder: Path, ranks: int) -> int:
    """Return the code of a rehearsal that has ended: one rank's refusal, or the code of all.

    Args:
        ranks: how many ranks this machine has started.

    Returns `FAILED` if they do not agree, or agree on a code that is not a clean exit.
    """
    refused = refusal(folder)
    if refused is not None:
        return refused
    codes = recorded_codes(folder)
    if len(codes) != ranks or len(set(codes)) != 1:
        return FAILED
    code = int(codes[0])
    if code not in CLEAN_EXITS or (code == 0 and launcher_code != 0):
        return FAILED
    return code
