# SPDX-License-Identifier: Apache-2.0
"""What must not be published of a text: paths of this machine, tokens, names of user and host."""

import contextlib
import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hub_ids import is_path

ABSOLUTE = re.compile(r"(?<![\w.:/~-])~?/[^\s'\"`,;:)\]]+")
TOKEN = re.compile(r"\b(hf|sk|api|ghp)_[A-Za-z0-9_-]{8,}")
FLAG = r"(?<![\w-])--[A-Za-z][\w-]*"  # It is never masked: somebody may be called max or seed.
MACHINE = re.compile(r"[0-9.-]")  # A host that is called gpu or lab identifies nobody.
# Names of users and hosts that many machines have, so that they identify nobody either
COMMON_NAMES = {
    "",
    "admin",
    "docker",
    "ec2-user",
    "home",
    "jovyan",
    "localhost",
    "nobody",
    "root",
    "runner",
    "ubuntu",
    "user",
    "users",
    "vscode",
}


class Cleaner:
    """Takes paths and names of this machine, and tokens, out of texts."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Note the run's own paths, which may have spaces, and its hub ids, which are public.

        Args:
            arguments: those of run.json.
        """
        paths = set()
        public = [FLAG]
        for value in arguments.values():
            for word in words_of(value):
                if word.startswith(("/", "~")):
                    paths.add(word)
                elif "/" in word and is_hub_id(word):
                    public.append(rf"(?<![\w./-]){re.escape(word)}(?![\w./-])")
        self._paths = sorted(paths, key=len, reverse=True)
        self._public = "|".join(public)

    def __call__(self, text: str) -> str:
        """Return a text in which a path is its last part, and tokens and names are masked."""
        for path in self._paths:
            text = text.replace(path, last_part(path))
        text = ABSOLUTE.sub(lambda found: last_part(found[0]), text)
        text = TOKEN.sub(lambda found: f"{found[1]}_***", text)
        for what, names in names_of_this_machine().items():
            for name in names:
                text = self._mask(text, name, what)
        return text

    def _mask(self, text: str, name: str, what: str) -> str:
        """Return a text with `what` in place of a name, but not within flags and hub ids."""

        def replace(found: re.Match[str]) -> str:
            return found[0] if found["name"] is None else what

        return re.sub(f"{self._public}|(?P<name>{pattern_of(name)})", replace, text)


def pattern_of(name: str) -> str:
    """Return the regular expression of a name as a word of its own, or as a part of alice_rows."""
    return rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"


def names_of_this_machine() -> dict[str, list[str]]:
    """Return {"user": names, "host": names} that tell who trained, and where."""
    users = set()
    with contextlib.suppress(OSError, KeyError, ImportError):  # A user without an entry
        users.add(getpass.getuser())
    users.add(Path(home_folder()).name)
    host = socket.gethostname()
    hosts = set()
    for name in (host, host.split(".")[0]):
        if MACHINE.search(name):
            hosts.add(name)
    # The longer name first: it may begin with the shorter one.
    return {
        "user": sorted(users - COMMON_NAMES, key=len, reverse=True),
        "host": sorted(hosts - COMMON_NAMES, key=len, reverse=True),
    }


def last_part(path: str) -> str:
    """Return the last part of a path; that of the home folder, a user's name, is hidden."""
    home = home_folder()
    if home and path.rstrip("/") in ("~", home):
        return "home"
    return Path(path).name


def home_folder() -> str:
    """Return the path of the user's home folder, or "" if there is none but the root."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return ""
    return "" if home == "/" else home


def words_of(value: Any) -> list[str]:
    """Return the texts of an argument: it may be one, several or none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)):
        return [word for word in value if isinstance(word, str)]
    return []


def is_hub_id(name: str) -> bool:
    """Return whether a name is an id of the hub, and no file or folder of this machine."""
    shaped = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
    return shaped and not is_path(name) and not Path(name).exists()
