# SPDX-License-Identifier: Apache-2.0
"""Every command ends by the same function."""

from launching import REPO

SCRIPTS = sorted(path for path in (REPO / "scripts").glob("*.py") if "__main__" in path.read_text())


def test_every_command_ends_by_the_same_function():
    for path in SCRIPTS:
        end = '\nif __name__ == "__main__":\n    run_command(main)\n'
        assert path.read_text().endswith(end), path.name
