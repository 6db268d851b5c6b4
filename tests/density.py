# SPDX-License-Identifier: Apache-2.0
"""How dense Python code is by its syntax tree, which no formatter changes and no line count sees.

A bound on the lines of a file or of a function is met by putting more into each statement, so there
is none. These bounds are on what a statement holds.
"""

import ast
import math

# "There" are the projects that the bounds are taken from: nanochat, torchtitan, OLMo-core, litgpt
NODES = 15  # bound for nine in ten statements; 13 to 14 there, 11 in accelerate
MOST_NODES = 60  # bound for any statement; the largest of a hundred has 27 to 36 there
TERNARIES = 40  # in 1,000 statements; 18 to 21 there, 35 in picotron
TUPLE_ASSIGNMENTS = 10  # in 1,000 statements; 1 to 10 there, 12 in picotron
# A shorter file may have as many ternaries and tuple assignments as one with this many statements
FEWEST_STATEMENTS = 100

SIMPLE = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return | ast.Raise
SIMPLE |= ast.Assert | ast.Delete
COMPOUND = ast.If | ast.While | ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.Match
LITERALS = ast.List | ast.Tuple | ast.Dict | ast.Set
# Parts of the tree that say nothing that is not said by the node that they belong to
SIGNS = ast.expr_context | ast.operator | ast.boolop | ast.cmpop | ast.unaryop
ANSWERS_OF_YES_OR_NO = {"bool", "isinstance", "issubclass", "hasattr", "any", "all"}


def size_of(node):
    """The nodes of a tree. A literal of constants is one: a table may be long."""
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, SIGNS)]
    is_table = all(isinstance(child, ast.Constant) for child in children)
    if isinstance(node, LITERALS) and is_table:
        return 1
    return 1 + sum(map(size_of, children))


def sizes_of_statements(tree):
    """(line, nodes) of each simple statement, and of the head of each compound one."""
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, SIMPLE) and not is_docstring:
            yield node.lineno, size_of(node)
        elif isinstance(node, COMPOUND):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr | ast.withitem):  # not of its body
                    yield node.lineno, size_of(child)


def findings(name, text):
    """What is too dense in a file, a line each."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    sizes = list(sizes_of_statements(tree))
    ordered = sorted(size for _, size in sizes)
    if ordered and ordered[round(0.9 * (len(ordered) - 1))] > NODES:
        yield f"{name}: more than one statement in ten has more than {NODES} nodes"
    for line, size in sizes:
        if size > MOST_NODES:
            yield f"{name}:{line}: a statement of {size} nodes"
    for kind, is_one, bound in (
        ("ternaries", is_ternary, TERNARIES),
        ("tuple assignments", is_tuple_assignment, TUPLE_ASSIGNMENTS),
    ):
        found = [node.lineno for node in nodes if is_one(node)]
        most = math.floor(bound * max(len(sizes), FEWEST_STATEMENTS) / 1000)
        if len(found) > most:
            yield f"{name}: {kind} in the lines {found}; {most} are allowed"
    faults = [(node, fault_of(node)) for node in nodes]
    yield from (f"{name}:{node.lineno}: {fault}" for node, fault in faults if fault)
    if "# fmt:" in text:
        yield f"{name}: laid out by hand"


def is_ternary(node):
    return isinstance(node, ast.IfExp)


def is_tuple_assignment(node):
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return True
    return False


def fault_of(node):
    """What no node may be, or None."""
    match node:
        case ast.IfExp() if any(map(is_ternary, list(ast.walk(node))[1:])):
            return "a ternary in a ternary"
        case ast.BinOp(left=left, op=ast.Mult() | ast.Sub(), right=right):
            if is_truth(left) or is_truth(right):
                return "arithmetic with truth"
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if isinstance(value, LITERALS):
            if any(isinstance(part, ast.Lambda) for part in ast.iter_child_nodes(value)):
                return "a lambda in an assignment"
        case ast.Expr(ast.BoolOp() | ast.IfExp()):
            return "a condition that is written as an expression"
    return None


def is_truth(node):
    """Whether an expression is true or false by its form."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in ANSWERS_OF_YES_OR_NO
    return False
