# SPDX-License-Identifier: Apache-2.0
"""--columns: which role each of a user's columns has, as far as the command line says.

It imports nothing that takes long, so that a wrong role is refused at once.
"""

import difflib
from collections.abc import Iterator

from components.arguments import DataArguments


def find_column_conflicts(args: DataArguments) -> Iterator[str]:
    """Yield a line for each pair in --columns that cannot be meant, and for each that conflicts."""
    roles = [*args.COLUMN_ROLES, *args.COLUMN_ARGUMENTS]
    seen = set()
    for pair in args.columns:
        role, _, column = pair.partition("=")
        problem = find_pair_problem(role, column, roles)
        if role in seen:
            problem = f"{role} is given twice"
        if problem:
            yield f"--columns {pair}: {problem}"
        seen.add(role)
    for name, value in args.columns_by_argument.items():
        given = getattr(args, name)
        if given != value:
            columns = " ".join(args.columns)
            yield f"--columns {columns} and --{name} name different columns: leave one out"


def find_pair_problem(role: str, column: str, roles: list[str]) -> str:
    """Return what is wrong with a pair ROLE=COLUMN in --columns, or ""."""
    if role in roles and column:
        return ""
    known = f"the roles are {', '.join(roles)}"
    similar = difflib.get_close_matches(role, roles, 1)
    if column in roles and not similar:
        return f"the role comes first: {column}={role}"
    if not column:
        return f"has to be ROLE=COLUMN; {known}"
    problem = f"no such role; {known}"
    for close in similar:
        problem += f"; did you mean {close}={column}?"
    return problem
