# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the tools have in common: wrong calls, and --version."""

import argparse
from typing import Any, NoReturn

import paths  # noqa: F401  makes recipes/ importable
from components import __version__
from exits import Exit


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with --version, whose usage errors are one line and end with 64."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")
