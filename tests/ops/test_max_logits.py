"""The blockwise maximum against all logits at once."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.max_logits import max_logits


@pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 5), (300, 300), (700, 1100)])
@pytest.mark.parametrize("window", [None, 40])
def test_blocks_add_up_to_the_masked_maximum_of_every_head(T, S, window):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, T, 3), torch.randn(2, 2, S, 3)
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    mask = (j <= i) & (i - j < (window or S)) & (torch.rand(2, 4, T, S) < 0.5)
    logits = np.einsum("bhtk,bhsk->bhts", q.double().numpy(), k.repeat_interleave(2, 1).double().numpy()) * 0.7
    expected = np.where(mask.numpy(), logits, -np.inf).max((0, 2, 3))
    spans = None if window is None else (lambda start, stop: [(0, 0), (max(0, start + S - T - window), stop + S - T)])
    result = max_logits(q, k, lambda rows, columns: mask[:, :, rows, columns], scale=0.7, spans=spans)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)


def test_16_bit_inputs_are_multiplied_in_full_precision_under_autocast_too():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 9, 8, dtype=torch.bfloat16)
    expected = (q.float() @ k.float().mT * 8**-0.5).amax((0, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        result = max_logits(q.requires_grad_(), k, lambda rows, columns: None)
    assert result.dtype == torch.float32 and not result.requires_grad
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
