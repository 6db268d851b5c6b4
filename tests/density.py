# SPDX-License-Identifier: Apache-2.0
"""How dense Python code is by its syntax tree, which no formatter changes and no line count sees.

A bound on the lines of a file or of a function is met by putting more into each statement, so there
is none. These bounds are on what a statement holds. Each rule is a function from a file to its
findings; `RULES` lists them.
"""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# "There" are the projects that the bounds are taken from: nanochat, torchtitan, OLMo-core, litgpt
NODES = 15  # bound for nine in ten statements; 13 to 14 there, 11 in accelerate
MOST_NODES = 60  # bound for any statement; the largest of a hundred has 27 to 36 there
TERNARIES = 40  # in 1,000 statements; 18 to 21 there, 35 in picotron
TUPLE_ASSIGNMENTS = 10  # in 1,000 statements; 1 to 10 there, 12 in picotron
# A shorter file may have as many ternaries and tuple assignments as one with this many statements
FEWEST_STATEMENTS = 100

SIMPLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Expr,
    ast.Return,
    ast.Raise,
    ast.Assert,
    ast.Delete,
)
COMPOUND = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Match)
LITERALS = (ast.List, ast.Tuple, ast.Dict, ast.Set)
# Parts of the tree that say nothing that is not said by the node that they belong to
SIGNS = {
    sign
    for kind in (ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop)
    for sign in kind.__subclasses__()
}
ANSWERS_OF_YES_OR_NO = {"bool", "isinstance", "issubclass", "hasattr", "any", "all"}


@dataclass(frozen=True)
class Code:
    """A file of Python.

    Attributes:
        nodes: of the syntax tree, but for SIGNS.
        sizes: (line, nodes) of each statement; of a compound one, its head is a statement.
    """

    name: str
    text: str
    nodes: list[ast.AST]
    sizes: list[tuple[int, int]]


Rule = Callable[[Code], Iterator[str]]


def read_code(name: str, text: str) -> Code:
    """Return a file with what all rules need of it."""
    reader = Reader()
    reader.visit(ast.parse(text))
    return Code(name, text, reader.nodes, reader.sizes)


class Reader:
    """Goes through a syntax tree once, and collects what `Code` has of it."""

    def __init__(self) -> None:
        self.nodes: list[ast.AST] = []
        self.sizes: list[tuple[int, int]] = []

    def visit(self, node: ast.AST) -> int:
        """Return the nodes of a tree. A literal of constants is one: a table may be long."""
        self.nodes.append(node)
        children = [child for child in ast.iter_child_nodes(node) if type(child) not in SIGNS]
        sizes = [self.visit(child) for child in children]
        if isinstance(node, ast.stmt):
            self._note_sizes(node, children, sizes)
        if isinstance(node, LITERALS) and all(
            isinstance(child, ast.Constant) for child in children
        ):
            return 1
        return 1 + sum(sizes)

    def _note_sizes(self, node: ast.stmt, children: list[ast.AST], sizes: list[int]) -> None:
        """Note what counts as a statement: a simple one, or the head of a compound one."""
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, SIMPLE) and not is_docstring:
            self.sizes.append((node.lineno, 1 + sum(sizes)))
        elif isinstance(node, COMPOUND):
            for child, size in zip(children, sizes, strict=True):
                if isinstance(child, ast.expr | ast.withitem):  # not of its body
                    self.sizes.append((node.lineno, size))


# ---- Rules ----
def dense_statements(code: Code) -> Iterator[str]:
    """Yield the file if more than one in ten of its statements have more than NODES nodes."""
    sizes = sorted(size for _, size in code.sizes)
    if not sizes:
        return
    usual = sizes[round(0.9 * (len(sizes) - 1))]
    if usual > NODES:
        yield f"{code.name}: one statement in ten has {usual} nodes or more"


def large_statements(code: Code) -> Iterator[str]:
    """Yield each statement of more than MOST_NODES nodes."""
    for line, size in code.sizes:
        if size > MOST_NODES:
            yield f"{code.name}:{line}: a statement of {size} nodes"


def many_ternaries(code: Code) -> Iterator[str]:
    """Yield the ternaries of a file that has more of them than TERNARIES allows."""
    yield from too_many(
        code, [node for node in code.nodes if isinstance(node, ast.IfExp)], TERNARIES
    )


def nested_ternaries(code: Code) -> Iterator[str]:
    """Yield each ternary that contains another one."""
    for node in code.nodes:
        if isinstance(node, ast.IfExp):
            inner = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(inner) > 1:
                yield f"{code.name}:{node.lineno}: a ternary in a ternary"


def many_tuple_assignments(code: Code) -> Iterator[str]:
    """Yield the assignments of several values at once if there are more than TUPLE_ASSIGNMENTS."""
    found = []
    for node in code.nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                found.append(node)
    yield from too_many(code, found, TUPLE_ASSIGNMENTS)


def arithmetic_with_truth(code: Code) -> Iterator[str]:
    """Yield each product or difference with what is true or false."""
    for node in code.nodes:
        match node:
            case ast.BinOp(left=left, op=ast.Mult() | ast.Sub(), right=right):
                if is_truth(left) or is_truth(right):
                    yield f"{code.name}:{node.lineno}: arithmetic with truth"


def hidden_lambdas(code: Code) -> Iterator[str]:
    """Yield each lambda that gets a name with other things, or in a table: it is a function."""
    for node in code.nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, LITERALS):
            if any(isinstance(part, ast.Lambda) for part in ast.iter_child_nodes(node.value)):
                yield f"{code.name}:{node.lineno}: a lambda in an assignment"


def conditions_as_statements(code: Code) -> Iterator[str]:
    """Yield each statement of the form `x or stop()`, which should be an `if`."""
    for node in code.nodes:
        match node:
            case ast.Expr(ast.BoolOp() | ast.IfExp()):
                yield f"{code.name}:{node.lineno}: a condition that is written as an expression"


def unformatted_code(code: Code) -> Iterator[str]:
    """Yield each comment that keeps the formatter away."""
    for number, line in enumerate(code.text.splitlines(), 1):
        if "# fmt:" in line:
            yield f"{code.name}:{number}: laid out by hand"


RULES: list[Rule] = [
    dense_statements,
    large_statements,
    many_ternaries,
    nested_ternaries,
    many_tuple_assignments,
    arithmetic_with_truth,
    hidden_lambdas,
    conditions_as_statements,
    unformatted_code,
]


def too_many(code: Code, found: list[ast.expr] | list[ast.stmt], bound: int) -> Iterator[str]:
    """Yield what was found where it is more than `bound` in 1,000 statements."""
    most = math.floor(bound * max(len(code.sizes), FEWEST_STATEMENTS) / 1000)
    if len(found) > most:
        for node in found:
            kind = type(node).__name__
            yield f"{code.name}:{node.lineno}: {kind}, one of {len(found)}, {most} are allowed"


def is_truth(node: ast.expr) -> bool:
    """Return whether an expression is true or false by its form."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in ANSWERS_OF_YES_OR_NO
    return False
