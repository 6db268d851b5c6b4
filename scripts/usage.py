"""How the command-line tools here refuse a wrong call."""

import argparse
from typing import NoReturn

USAGE = 64  # EX_USAGE of sysexits.h


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are one line and end with 64, as everywhere here."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")
