"""How the planner ends early: with one line for the user and an exit code."""

from exits import Exit

NO_HUB = 69
CANNOT_WRITE = 73


class PlannerError(Exception):
    """Anything that ends a call of the planner; `code` is the exit code of the command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class UnplannableError(PlannerError):
    """The request cannot be planned: it is wrong, or the planner does not support it."""

    def __init__(self, message: str, code: int = Exit.USAGE) -> None:
        super().__init__(message, code)


class CannotWriteError(PlannerError):
    """A plan cannot be written to the requested path."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"cannot write {path}: {error}", CANNOT_WRITE)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 200 characters of it."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    return lines[0][:200]
