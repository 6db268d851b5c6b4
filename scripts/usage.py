"""How the command-line tools here refuse a wrong call."""

import argparse
from typing import NoReturn

from exits import Exit


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are one line and end with 64, as everywhere here."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")
