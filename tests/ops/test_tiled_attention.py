"""Attention over tiles, selections and fixed patterns against an explicit mask, in fp64 and with gradients."""

import pytest
import torch

from frankenstein_hf.modeling.ops.block_selection import top_blocks
from frankenstein_hf.modeling.ops.patterns import (
    BigBirdPattern,
    FixedPattern,
    StridedPattern,
    WindowPattern,
    pattern_attention,
)
from frankenstein_hf.modeling.ops.tiled_attention import Tile, selected_block_attention, tiled_attention


def dense(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -1e300)
    return scores.softmax(-1) @ v


def inputs(B, H, G, T, S, D=6, scale=1.0):
    return [
        torch.randn(B, h, t, D, dtype=torch.float64).mul_(scale).requires_grad_() for h, t in ((H, T), (G, S), (G, S))
    ]


def assert_same(out, expected, leaves):
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    direction = torch.randn_like(expected)
    for actual, wanted in zip(*(torch.autograd.grad(x, leaves, direction) for x in (out, expected))):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-11)


PATTERNS = {
    "window": WindowPattern(5),
    "dilated": WindowPattern(3, 2, (0, 7, 200)),
    "globals": WindowPattern(40, 0, (3, 130, 131)),
    "many globals": WindowPattern(0, 0, tuple(range(9))),
    "bigbird": BigBirdPattern(9, 4, 2, 1, seed=3, layer=1),
    "bigbird, odd blocks": BigBirdPattern(20, 7, 3, 2),
    "strided": StridedPattern(7),
    "stride 1": StridedPattern(1),
    "fixed": FixedPattern(6, 2),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_of_a_pattern_hold_every_visible_pair_once(name, is_causal):
    pattern = PATTERNS[name]
    for T, S in ((1, 1), (5, 5), (67, 67), (300, 300), *([(1, 150), (9, 150), (150, 290)] if is_causal else [])):
        leaves, offset = inputs(2, 4, 2, T, S), S - T
        i, j = offset + torch.arange(T)[:, None], torch.arange(S)
        mask = pattern.seen(i, j, S, is_causal)
        out, _ = pattern_attention(*leaves, pattern, offset=offset, is_causal=is_causal)
        assert_same(out, dense(*leaves, mask), leaves)
        count = torch.zeros(T, S, dtype=torch.long)
        for tile in pattern.tiles(T, S, offset, is_causal, torch.device("cpu")):
            rows, keys = torch.arange(T)[tile.queries], torch.arange(S)[tile.keys]
            seen = torch.ones(len(rows), len(keys), dtype=torch.long)
            if tile.hidden is not None:
                seen = (~tile.hidden).long()
            count[rows[:, None], keys] += seen[:, : len(keys)]
            if tile.links is not None:
                links = tile.links.repeat_interleave(len(rows) // len(tile.links), dim=0)
                count[rows] += torch.zeros(len(rows), S, dtype=torch.long).scatter_add(1, links, seen[:, len(keys) :])
        assert torch.equal(count, mask.long())


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [2, 4])  # one selection a group, or one a query head
def test_selected_blocks_share_one_softmax(heads, is_causal, scale):
    """Logits beyond ±60 of one another included."""
    T, S, block, offset = (40, 53, 8, 13) if is_causal else (53, 53, 8, 0)
    leaves = inputs(2, 4, 2, T, S, scale=scale**0.5)
    i, b = offset + torch.arange(T)[:, None], torch.arange(7)
    chosen = torch.rand(2, heads, T, 7) < 0.4
    chosen = (chosen & (b <= i // block) if is_causal else chosen) | (b == i // block)
    mask = chosen.repeat_interleave(block, dim=-1)[..., :S].repeat_interleave(4 // heads, dim=1)
    if is_causal:
        mask = mask & (torch.arange(S) <= i)
    out, masses = selected_block_attention(*leaves, chosen, block, offset=offset, is_causal=is_causal, want_masses=True)
    q, k, _ = leaves
    weights = (q @ k.repeat_interleave(2, 1).mT * 6**-0.5).masked_fill(~mask, -1e300).softmax(-1)
    expected = torch.nn.functional.pad(weights, (0, 56 - S)).unflatten(-1, (7, 8)).sum(-1)
    torch.testing.assert_close(masses, expected.unflatten(1, (heads, -1)).mean(2), rtol=1e-9, atol=1e-12)
    assert_same(out, dense(*leaves, mask), leaves)


def test_a_query_that_meets_nothing_gives_zero_and_finite_gradients():
    leaves = inputs(1, 2, 2, 3, 4)
    tiles = [Tile(slice(0, 2), slice(0, 4), torch.tensor([[True] * 4, [False] * 4]))]
    out = tiled_attention(*leaves, tiles)
    assert (out[:, :, [0, 2]] == 0).all() and (out[:, :, 1] != 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("pattern", [WindowPattern(4), StridedPattern(3), BigBirdPattern(2, 2, 1, 1)], ids=str)
def test_dropout_drops_the_same_weights_in_both_passes_and_keeps_the_mean(pattern):
    leaves = inputs(1, 2, 1, 12, 12, D=3)

    def run(*leaves):
        torch.manual_seed(7)
        return pattern_attention(*leaves, pattern, offset=0, is_causal=True, dropout=0.4)[0]

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    plain = pattern_attention(*leaves, pattern, offset=0, is_causal=True)[0]
    torch.manual_seed(1)
    many = [pattern_attention(*leaves, pattern, offset=0, is_causal=True, dropout=0.4)[0].detach() for _ in range(400)]
    assert not torch.equal(many[0], plain)
    assert (torch.stack(many).mean(0) - plain).abs().mean() < 0.1 * plain.abs().mean()


def test_best_blocks_are_taken_and_ties_go_to_the_lowest_index():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    allowed = torch.tensor([[True] * 5, [False, True, True, True, True], [False, False, False, False, True]])
    chosen = top_blocks(scores, 2, allowed)
    assert [row.nonzero().flatten().tolist() for row in chosen] == [[1, 2], [1, 2], [4]]
    assert not top_blocks(scores, 0, allowed).any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_random_blocks_are_a_pure_function_and_lie_where_nothing_else_is(is_causal):
    pattern = BigBirdPattern(side=8, block_size=4, num_random=3, num_global=2, seed=5, layer=2)
    n = torch.arange(60)
    blocks = pattern.random_blocks(n, 60, is_causal)
    assert torch.equal(pattern.random_blocks(n[20:30], 60, is_causal), blocks[20:30])
    if is_causal:
        assert torch.equal(pattern.random_blocks(n, 40, is_causal), blocks)  # of the future nothing is known
    for other in (BigBirdPattern(8, 4, 3, 2, seed=6, layer=2), BigBirdPattern(8, 4, 3, 2, seed=5, layer=3)):
        assert not torch.equal(other.random_blocks(n, 60, is_causal), blocks)
    for block, chosen in zip(n.tolist(), blocks.tolist()):
        real = [b for b in chosen if b >= 0]
        assert len(set(real)) == len(real)
        assert all(b >= 2 and abs(b - block) > 2 for b in real)
        free = [b for b in range(2, block if is_causal else 60) if abs(b - block) > 2]
        assert len(real) == min(3, len(free))
    many = BigBirdPattern(0, 1, 1, 0).random_blocks(torch.full((1,), 10), 11, True)
    draws = [BigBirdPattern(0, 1, 1, 0, seed=s).random_blocks(torch.tensor([10]), 11, True).item() for s in range(2000)]
    counts = torch.bincount(torch.tensor(draws), minlength=10)
    assert many.shape == (1, 1) and len(counts) == 10 and counts.min() > 140 and counts.max() < 260
