"""The cores' custom operators: what PyTorch asks of one (schema, shapes without data, gradients under a compiler)."""

import pytest
import torch

from frankenstein_hf.modeling.ops import decayed_scan, delta_rule, diagonal_scan  # noqa: F401  (they register them)

B, H, T, K, V = 2, 3, 21, 4, 5


def heads(width):
    """[B, H, T, width] with the strides a mixer gives it."""
    return torch.randn(B, T, H, width).transpose(1, 2).requires_grad_()


def gates(*shape):
    return (-torch.rand(*shape)).requires_grad_()


STATE = torch.zeros(B, H, K, V)
CASES = {
    "delta_rule": [
        (heads(K), heads(K), heads(V), gates(B, H, T), gates(B, H, T), None, STATE, 0.5, 8, True),
        (heads(K), heads(K), heads(V), gates(B, H, T, K), heads(K), heads(V), STATE, 1.0, 16, True),
        (heads(K), heads(K), heads(V), gates(B, H, T), heads(K), None, STATE, 1.0, 8, False),
    ],
    "decayed_scan": [
        (heads(K), heads(K), heads(V), None, None, "key", 1.0, 8),
        (heads(K), heads(K), heads(V), gates(B, H, T), STATE, "key", 0.5, 8),
        (heads(K), heads(K), heads(V), gates(B, H, T, K), STATE, "key", 0.5, 8),
        (heads(K), heads(K), heads(V), gates(B, H, T, V), None, "value", 0.5, 8),
    ],
    "diagonal_scan": [(gates(B, T, K), torch.randn(B, T, K, requires_grad=True), torch.zeros(B, K))],
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_an_operator_is_what_it_says(name, number):
    operator = getattr(torch.ops.frankenstein, name).default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, CASES[name][number], test_utils=tests)
