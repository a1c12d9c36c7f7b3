"""Every optimizer has a test that derives its steps from the paper, independently of the package."""

import ast
from pathlib import Path

import pytest

from .toy import NAMES, check_parity, parity_of


def derived() -> set[str]:
    """Names that `check_parity` is called with, or that a test is marked with by `parity_of`, in this folder."""
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
            if called in (check_parity.__name__, parity_of.__name__):
                found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_parity_test(name):
    assert name in derived(), (
        f"No test in tests/optim derives the steps of {name!r} from its paper. Write one with "
        f"check_parity({name!r}, derive), or mark a test of another form with @parity_of({name!r})."
    )
