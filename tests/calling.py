# SPDX-License-Identifier: Apache-2.0
"""Call a command of scripts/ in this process, which is faster than a launch."""

import sys


def call(monkeypatch, capsys, command, session, *words):
    """Return the exit code of a command, and what it printed.

    Args:
        command: the module with parse_args.
        session: the module with run.
    """
    monkeypatch.setattr(sys, "argv", [command.__file__, *map(str, words)])
    try:
        session.run(command.parse_args())
        code = 0
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err
