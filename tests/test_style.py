"""One thought a line: a few forms that fold several thoughts into one statement, and what to write instead."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*(ROOT / "colab_swarm").rglob("*.py"), *(ROOT / "tests/benchmarks").rglob("*.py")])


def assigns_unrelated_values(node: ast.AST) -> bool:
    """``a, b = x, y``, unless a value needs an old value of a target, as in a swap."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    targets = {ast.unparse(part) for target in node.targets for part in getattr(target, "elts", ())}
    read = {
        ast.unparse(part)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
    }
    return bool(targets) and not targets & read


def is_condition(node: ast.AST) -> bool:
    """A comparison, ``not x``, ``bool(x)``, or several of them joined; not ``x or 0.0``, which is a default."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(map(is_condition, node.values))
    return isinstance(node, ast.Compare)


def calculates_with_conditions(node: ast.AST) -> bool:
    """``LEFT_OUT * (member in late)`` or ``count + (x > 0)``."""
    if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.BitAnd | ast.BitOr):  # those join masks
        return False
    return is_condition(node.left) or is_condition(node.right)


def acts_in_an_expression(node: ast.AST) -> bool:
    """``a() if x else b()``, ``x and a()`` or ``[a(x) for x in xs]`` as a statement."""
    return isinstance(node, ast.Expr) and isinstance(
        node.value, ast.IfExp | ast.BoolOp | ast.ListComp | ast.Tuple
    )


def folded_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line numbers where a rule is broken, and the rule."""
    nodes = list(ast.walk(tree))
    tests = [n.test for n in nodes if isinstance(n, ast.If | ast.While)]
    in_tests = {inner for test in tests for inner in ast.walk(test)}
    for node in nodes:
        if assigns_unrelated_values(node):
            yield node.lineno, "assign unrelated values on a line each"
        if isinstance(node, ast.NamedExpr) and node not in in_tests:
            yield node.lineno, "no := outside the test of an if or while: assign on a line before"
        if calculates_with_conditions(node):
            yield node.lineno, "no arithmetic with a condition: write an if"
        if acts_in_an_expression(node):
            yield node.lineno, "an effect is a statement: write the if or the loop"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("colab_swarm.")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_line_has_one_thought(path: Path) -> None:
    broken = [f"{path}:{line}: {rule}" for line, rule in folded_lines(ast.parse(path.read_text()))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "line",
    [
        "a, b = x, y",
        "self.a, b = None, 0",
        "f(a := x)",
        "a = word * (x in xs)",
        "a = [word] * bool(x)",
        "a += 1 + (x > 0)",
        "a() if x else b()",
        "x and a()",
        "[a(x) for x in xs]",
    ],
)
def test_a_folded_line_is_noticed(line: str) -> None:
    assert list(folded_lines(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "a, b = b, a",
        "a, b = point",
        "a[0], a[-1] = a[-1], a[0]",
        "a, b = b, a + b",
        "a = x if x else y",
        "if a := f(x): pass",
        "while (a := f(x)) and a > 0: pass",
        "a = [f(x) for x in xs if x]",
        "a = '-' * width",
        "a = (b or 1.0) * c",
    ],
)
def test_a_plain_line_is_not(line: str) -> None:
    assert not list(folded_lines(ast.parse(line)))
