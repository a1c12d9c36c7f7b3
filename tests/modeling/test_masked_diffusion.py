"""Filling in masks place by place, and the score entropy of masked diffusion."""

import math

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf.data import GeometricNoise
from frankenstein_hf.modeling.losses import score_entropy_loss
from frankenstein_hf.modeling.masked_generation import fill_masks

V, MASK = 12, 3


def small(**options):
    torch.manual_seed(0)
    config = fhf.FrankensteinConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, layer_pattern=["standard", "gla"],
        initializer_range=0.6, mask_token_id=MASK, pad_token_id=0, **options,
    )  # fmt: skip
    return fhf.FrankensteinForMaskedLM(config).eval()


def plainly(model, ids, tokens_per_step=1, order="top_probability"):
    """One row, place by place, the likeliest token at the surest place, in plain Python."""
    ids = list(ids)
    while MASK in ids:
        logits = model(torch.tensor([ids])).logits[0].double()
        logits[:, [MASK, 0]] = -math.inf
        found = []
        for place, token in enumerate(ids):
            if token == MASK:
                p = logits[place].softmax(-1).sort(descending=True)
                sure = p.values[0] - p.values[1] if order == "margin" else p.values[0]
                found.append((-float(sure), place, int(p.indices[0])))
        for _, place, token in sorted(found)[:tokens_per_step]:
            ids[place] = token
    return ids


@pytest.mark.parametrize("order", ["top_probability", "margin"])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@torch.no_grad()
def test_the_surest_places_come_first(order, tokens_per_step):
    model = small()
    rows = [[5, MASK, MASK, 7, MASK, MASK, MASK, 1], [MASK] * 8, [4, 5, 6, 7, 8, 9, 10, 11]]
    written = model.generate_masked(torch.tensor(rows), tokens_per_step=tokens_per_step, temperature=0, order=order)
    assert written.tolist() == [plainly(model, row, tokens_per_step, order) for row in rows]
    for given, new in zip(rows, written.tolist()):
        assert all(a == b for a, b in zip(given, new) if a != MASK) and MASK not in new


def test_pads_change_nothing_and_keep_their_masks():
    model = small()
    row = torch.tensor([[5, MASK, MASK, 7, MASK]])
    alone = model.generate_masked(row, temperature=0)
    padded = torch.cat([torch.full((1, 3), MASK), row], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert torch.equal(model.generate_masked(padded, mask, temperature=0)[:, 3:], alone)
    assert (model.generate_masked(padded, mask, temperature=0)[:, :3] == MASK).all()


def test_what_is_drawn_follows_the_model_and_the_generator():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]))
    ids = torch.full((4000, 1), 3)

    def constant(ids):
        return logits.expand(*ids.shape, -1)

    def draw(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        return fill_masks(constant, ids, 3, temperature=temperature, suppress_tokens=[0], generator=generator)

    for temperature in (1.0, 0.5):
        share = torch.bincount(draw(0, temperature).flatten(), minlength=5) / 4000
        wanted = (logits / temperature).masked_fill(torch.tensor([1, 0, 0, 1, 0]).bool(), -math.inf).softmax(-1)
        assert (share - wanted).abs().max() < 4 * 0.5 / math.sqrt(4000) and share[0] == share[3] == 0
    assert torch.equal(draw(1, 1.0), draw(1, 1.0)) and not torch.equal(draw(1, 1.0), draw(2, 1.0))
    assert len(set(fill_masks(constant, ids[:50], 3, order="random").flatten().tolist())) > 1


def test_a_model_in_training_stays_in_training_and_bad_arguments_are_named():
    model = small().train()
    x = torch.full((1, 3), MASK)
    model.generate_masked(x)
    assert model.training
    for wrong, message in (
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"order": "top"}, "order='top'"),
        ({"suppress_tokens": [99]}, "suppress_tokens"),
        ({"suppress_tokens": range(V)}, "no token"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_masked(x, **wrong)
    with pytest.raises(ValueError, match="whole numbers"):
        model.generate_masked(x.float())
    model.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        model.generate_masked(x)


# ------------------------------------------------------------------ score entropy


def test_the_loss_is_the_sum_written_out():
    torch.manual_seed(0)
    logits, targets = torch.randn(5, V, dtype=torch.float64), torch.tensor([0, 1, 2, 4, 5])
    noise = torch.tensor([1e-4, 0.1, 1.0, 5.0, 20.0], dtype=torch.float64)
    rate = torch.rand(5, dtype=torch.float64)
    expected = 0.0
    for z, y, sigma, weight in zip(logits.numpy(), targets.tolist(), noise.tolist(), rate.tolist()):
        a = 1 / (math.exp(sigma) - 1)
        log_scores = [float(x) - math.log(math.exp(sigma) - 1) - math.log(V - 1) for x in z]
        inside = sum(math.exp(s) for k, s in enumerate(log_scores) if k != MASK)
        expected += weight * (inside - a * log_scores[y] + a * (math.log(a) - 1))
    found = score_entropy_loss(logits, targets, noise, rate, MASK, 7)
    assert float(found) == pytest.approx(expected / 7, rel=1e-10)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: score_entropy_loss(z, targets, noise, rate, MASK, 7), (logits,))


def test_the_best_scores_are_the_probabilities_and_cost_their_entropy():
    """At s_y = a·p(y) the gradient is zero and a token costs σ′·a·H(p)."""
    p = torch.rand(V, dtype=torch.float64)
    p[MASK] = 0
    p = p / p.sum()
    logits = (p.log() + math.log(V - 1)).expand(V, -1).clone().requires_grad_()
    keep = torch.arange(V) != MASK
    total, gradient = 0.0, torch.zeros(V, dtype=torch.float64)
    sigma = torch.tensor([0.7], dtype=torch.float64)
    for y in range(V):
        if y != MASK:
            loss = score_entropy_loss(logits[y : y + 1], torch.tensor([y]), sigma, torch.ones(1), MASK, 1)
            total += float(p[y] * loss)
            gradient += p[y] * torch.autograd.grad(loss, logits)[0][y]
    a, entropy = 1 / math.expm1(0.7), float(-(p[keep] * p[keep].log()).sum())
    assert total == pytest.approx(a * entropy, rel=1e-10)
    assert gradient[keep].abs().max() < 1e-12


def test_the_expected_loss_of_a_certain_text_is_its_length_times_the_usual_cross_entropy():
    """Over times, the loss of predictions that do not depend on them is the cross-entropy a token."""
    noise = GeometricNoise(1e-4, 20.0, first=0.0)
    time = torch.linspace(0, 1, 20_001, dtype=torch.double)
    at = noise.at(time)
    p = torch.full((V,), 0.0, dtype=torch.double)
    p[5], p[6] = 0.25, 0.75
    logits = (p.clamp_min(1e-300).log() + math.log(V - 1))[None]
    cost = torch.stack(
        [score_entropy_loss(logits, torch.tensor([5]), s[None], r[None], MASK, 1) for s, r in zip(at.total, at.speed)]
    )
    likeliest = float(torch.trapezoid(cost * at.rate, time))
    # −log p(target) of the target, up to what does not depend on the model: Σ s_y − a = 0 for probabilities
    assert likeliest == pytest.approx(math.log(4) * (math.exp(-1e-4) - math.exp(-20)), rel=1e-4)


def test_the_head_trains_with_it_and_counts_all_tokens_that_could_be_hidden():
    model = small(masked_lm_loss="score_entropy").train()
    labels = torch.tensor([[-100, 4, 5, 6, 7, -100], [-100, 8, 9, 10, -100, -100]])
    ids = labels.clone().clamp_min(1)
    ids[0, 2] = ids[0, 4] = ids[1, 1] = MASK
    noise, rate = torch.full((2, 6), 0.8), torch.full((2, 6), 2.0)
    out = model(ids, labels=labels, noise=noise, noise_rate=rate)
    hidden = ids == MASK
    expected = score_entropy_loss(
        out.logits[hidden], labels[hidden], noise[hidden], rate[hidden], MASK, int((labels != -100).sum())
    )
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    split = model(ids, labels=labels, noise=noise, noise_rate=rate, num_items_in_batch=14).loss
    torch.testing.assert_close(split * 2, out.loss)
    with pytest.raises(ValueError, match="needs input_ids, noise and noise_rate"):
        model(ids, labels=labels)
    with pytest.raises(ValueError, match="score_entropy"):
        small()(ids, labels=labels, noise=noise, noise_rate=rate)
    with pytest.raises(ValueError, match="mask_token_id"):
        fhf.FrankensteinConfig(masked_lm_loss="score_entropy")
    with pytest.raises(ValueError, match="label_smoothing"):
        small(masked_lm_loss="score_entropy", label_smoothing=0.1)
