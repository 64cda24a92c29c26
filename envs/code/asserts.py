"""Parse assert statements into hidden tests, as HumanEval, MBPP and LeetCode's data sets write them.

The statements are parsed, never run: a test must call the function with literals and compare its value with a literal.
So the expected value stays out of the sandbox, which an assert that runs beside the submission can't promise.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence

from agentrl.envs.code.grading import CallCase
from agentrl.envs.code.values import EXACTLY, TRUTH, Tolerance, described

MAX_SOURCE_CHARS = 1_000_000
"""Limit of test code, and of the arguments of one call."""
_MAX_NUMBER = 2**63
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class UnreadableTest(ValueError):
    """A row, or a test of it, that can't be graded here; the text says why in a few words."""


def read_asserts(source: str, name: str) -> tuple[CallCase, ...]:
    """Parse the tests in ``source``: assert statements, or a function ``check`` that holds nothing else.

    These forms are accepted, with literals for args and value, and numbers combined with ``+ - * /``::

        name(args) == value      name(args) is value      name(args)      not name(args)
        abs(name(args) - value) < tolerance      math.isclose(name(args), value, rel_tol=…, abs_tol=…)

    Args:
        source: Python source.
        name: the function under test, as ``source`` calls it.

    Raises:
        UnreadableTest: a statement is none of these.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise UnreadableTest("test code is too long")
    try:
        body = _statements(_parse(source))
        return tuple(_case(node.test, name) for node in body if not isinstance(node.test, ast.Constant))
    except UnreadableTest:
        raise
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError, ZeroDivisionError) as error:
        raise UnreadableTest("a test is no assert on literals") from error


def call_name(source: str, defined: str) -> str:
    """Find the first function that assert statements call and ``defined`` defines; empty where there is none."""
    functions = {node.name for node in _nodes(defined) if isinstance(node, ast.FunctionDef)}
    calls = [node.func for node in _nodes(source) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name) and call.id in functions]
    return names[0] if names else ""


def imported(source: str) -> set[str]:
    """List the top-level packages that ``source`` imports; none where it is no Python."""
    nodes = _nodes(source)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _nodes(source: str) -> list[ast.AST]:
    """List all syntax nodes of ``source``; none where it is no Python."""
    try:
        return [*ast.walk(_parse(source))]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def call_of(
    args: Sequence[object], kwargs: Mapping[str, object], *accepted: object, tolerance: Tolerance = EXACTLY
) -> CallCase:
    """Make a test of the call ``f(*args, **kwargs)``, whose value must be one of ``accepted``.

    Raises:
        UnreadableTest: an argument or an accepted value has no literal, or is too large.
    """
    try:
        arguments = repr((tuple(args), dict(kwargs)))
        if len(arguments) > MAX_SOURCE_CHARS:
            raise ValueError("the arguments are too large")
        ast.literal_eval(arguments)  # an infinite float, for one, has no literal
        return CallCase(arguments=arguments, accepted=tuple(map(described, accepted)), tolerance=tolerance)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableTest("an argument or a value has no literal, or is too large") from error


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a data set's invalid escapes nobody needs to hear
        return ast.parse(source)


def _statements(tree: ast.Module) -> list[ast.Assert]:
    """Return the asserts of the function ``check``, or else of the module."""
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    body = checks[0].body if checks else tree.body
    if any(not isinstance(node, ast.Assert | ast.Expr | ast.Pass) for node in body):
        raise UnreadableTest("the tests are more than asserts")
    return [node for node in body if isinstance(node, ast.Assert)]


def _case(test: ast.expr, name: str) -> CallCase:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=call):
            return _call(call, name, False, TRUTH)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[call, value]):
            words = {str(word.arg): _number(word.value) for word in test.keywords}
            close = Tolerance(relative=words.pop("rel_tol", 1e-9), absolute=words.pop("abs_tol", 0.0))
            if words:
                raise UnreadableTest("math.isclose takes no such argument")
            return _call(call, name, _number(value), close)
        case ast.Call():
            return _call(test, name, True, TRUTH)
        case ast.Compare(left=ast.Call(func=ast.Name(id="abs"), args=[difference]), ops=[ast.Lt() | ast.LtE()]):
            if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
                raise UnreadableTest("a test is no comparison with a literal")
            near = Tolerance(relative=0.0, absolute=_number(test.comparators[0]))
            return _call(difference.left, name, _number(difference.right), near)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            # `assert 3 == f(1)` is as common as the other order.
            call, value = (left, right) if isinstance(left, ast.Call) else (right, left)
            return _call(call, name, _literal(value))
        case _:
            raise UnreadableTest("a test is no comparison with a literal")


def _call(call: ast.expr, name: str, value: object, tolerance: Tolerance = EXACTLY) -> CallCase:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != name:
        raise UnreadableTest("a test calls something else than the function")
    kwargs = {str(word.arg): _literal(word.value) for word in call.keywords if word.arg}
    if len(kwargs) != len(call.keywords):
        raise UnreadableTest("a test calls the function with **")
    return call_of([_literal(argument) for argument in call.args], kwargs, value, tolerance=tolerance)


class _Fold(ast.NodeTransformer):
    """Folds arithmetic on numbers, which ``literal_eval`` refuses, into constants."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if type(node.op) not in _ARITHMETIC:
            raise UnreadableTest("a test calculates with more than + - * /")
        left, right = ast.literal_eval(node.left), ast.literal_eval(node.right)
        # Bounded operands of these types only: "a" * 10**9 would be a literal as large as the memory.
        for number in (left, right):
            if type(number) not in (int, float) or abs(number) > _MAX_NUMBER:
                raise UnreadableTest("a test calculates with more than numbers")
        return ast.Constant(_ARITHMETIC[type(node.op)](left, right))


def _literal(node: ast.expr) -> object:
    return ast.literal_eval(_Fold().visit(node))


def _number(node: ast.expr) -> float:
    number = _literal(node)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise UnreadableTest("a test compares with what is no number")
    return float(number)
