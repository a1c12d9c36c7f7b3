"""Losses over classes: exact where torch's cancel, torch's own elsewhere, in every head."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import LOSS_MAPPING

import frankenstein_hf as fhf
from frankenstein_hf.modeling.losses import LOSSES, cancellation_free_cross_entropy, class_loss

HEADS = ["CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "MultipleChoice"]


def gradient(function, logits):
    logits = logits.clone().requires_grad_()
    loss = function(logits)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("V", [1, 2, 7, 40])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
def test_it_is_torchs_where_nothing_cancels(V, smoothing, items):
    torch.manual_seed(0)
    logits = torch.randn(11, V, dtype=torch.float64) * 2
    targets = torch.randint(0, V, (11,))
    targets[3] = -100
    for fixed in (False, True):
        options = dict(fixed=fixed, label_smoothing=smoothing)
        ours, ours_grad = gradient(partial(class_loss, targets=targets, num_items_in_batch=items, **options), logits)
        total, total_grad = gradient(
            lambda z: F.cross_entropy(z, targets, reduction="sum", label_smoothing=smoothing), logits
        )
        by = 10 if items is None else int(items)
        torch.testing.assert_close(ours, total / by, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours_grad, total_grad / by, rtol=1e-12, atol=1e-15)


def test_gradcheck_with_impossible_classes_and_a_far_leader():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64)
    logits[0, 2], logits[1, 3:] = 30.0, -torch.inf
    targets = torch.tensor([2, 0, 5, 1])
    finite = logits.isfinite()
    free = logits[finite].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: cancellation_free_cross_entropy(
            torch.full_like(logits, -torch.inf).masked_scatter(finite, x), targets
        ),
        (free,),
    )


@pytest.mark.parametrize("lead", [10.0, 25.0, 40.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_lives_beyond_the_cliff(lead, dtype):
    logits = torch.zeros(1, 4, dtype=dtype)
    logits[0, 1] = lead
    others = 3 * math.exp(-lead)
    loss, grad = gradient(lambda z: cancellation_free_cross_entropy(z, torch.tensor([1])).sum(), logits)
    rounding = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert float(loss) == pytest.approx(
        math.log1p(others), rel=max(1e-6, rounding) if dtype != torch.float64 else 1e-12
    )
    assert float(grad[0, 1]) == pytest.approx(-others / (1 + others), rel=rounding)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float32, 4.8e-7)]
)  # bf16: every entry is rounded
def test_gradients_of_a_row_sum_to_zero(dtype, bound):
    torch.manual_seed(0)
    logits = (torch.randn(64, 300) * 3).to(dtype)
    targets = torch.randint(0, 300, (64,))
    logits[torch.arange(32), targets[:32]] += 30
    _, grad = gradient(lambda z: cancellation_free_cross_entropy(z, targets).sum(), logits)
    grad = grad.double()
    assert (grad.sum(1).abs() <= bound * grad.abs().sum(1)).all()


def test_slices_of_rows_change_nothing(monkeypatch):
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 5), torch.randint(0, 5, (9,))
    whole = gradient(lambda z: cancellation_free_cross_entropy(z, targets).sum(), logits)
    monkeypatch.setattr("frankenstein_hf.modeling.losses.SLICE", 10)
    for one, other in zip(whole, gradient(lambda z: cancellation_free_cross_entropy(z, targets).sum(), logits)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def tiny(**options):
    return fhf.FrankensteinConfig(
        vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, layer_pattern=["standard"],
        num_labels=3, **options,
    )  # fmt: skip


def built(head, **options):
    torch.manual_seed(0)
    return getattr(fhf, f"FrankensteinFor{head}")(tiny(**options)).train()


def batch(head):
    torch.manual_seed(1)
    ids = torch.randint(0, 19, (2, 2, 7) if head == "MultipleChoice" else (2, 7))
    labels = {"SequenceClassification": torch.tensor([0, 2]), "MultipleChoice": torch.tensor([1, 0])}.get(head)
    if labels is None:
        labels = torch.randint(0, 3, (2, 7))
        labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("items", [None, 9])
def test_every_head_honours_the_options(head, items):
    plain = built(head)(**batch(head), num_items_in_batch=items)
    fixed = built(head, fixed_cross_entropy=True)(**batch(head), num_items_in_batch=items)
    torch.testing.assert_close(plain.loss, fixed.loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(plain.logits, fixed.logits)
    labels, logits = batch(head)["labels"], plain.logits
    if head == "CausalLM":
        labels, logits = labels[:, 1:], logits[:, :-1]
    flat, classes = labels.reshape(-1), logits.reshape(-1, logits.shape[-1])
    wanted = F.cross_entropy(classes, flat, label_smoothing=0.2, reduction="sum")
    wanted = wanted / ((flat != -100).sum() if items is None else items)
    for fixed in (False, True):
        model = built(head, label_smoothing=0.2, fixed_cross_entropy=fixed)
        loss = model(**batch(head), num_items_in_batch=items).loss
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


def test_spans_take_the_fixed_form_and_refuse_smoothing():
    ids = batch("CausalLM")["input_ids"]
    places = dict(start_positions=torch.tensor([1, 9]), end_positions=torch.tensor([2, 3]))
    plain = built("QuestionAnswering")(ids, **places).loss
    fixed = built("QuestionAnswering", fixed_cross_entropy=True)(ids, **places).loss
    torch.testing.assert_close(plain, fixed, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 acts on class labels"):
        built("QuestionAnswering", label_smoothing=0.1)(ids, **places)


def test_numbers_to_learn_refuse_both():
    ids = batch("CausalLM")["input_ids"]
    for option in ({"label_smoothing": 0.1}, {"fixed_cross_entropy": True}):
        with pytest.raises(ValueError, match="numbers to learn"):
            built("SequenceClassification", problem_type="regression", **option)(ids, labels=torch.zeros(2, 3))


def test_an_assigned_loss_function_stays_and_off_is_transformers_own():
    model = built("CausalLM", label_smoothing=0.1)
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 7
    assert float(model(**batch("CausalLM")).loss) == 7
    for head in HEADS[:-1]:
        assert built(head).loss_function is LOSS_MAPPING[f"For{head}"]
    assert {*LOSSES} == {f"For{head}" for head in [*HEADS, "QuestionAnswering"]}


def test_labels_outside_the_vocabulary_are_named():
    for fixed in (False, True):
        with pytest.raises(ValueError, match="from 0 to 18"):
            built("CausalLM", fixed_cross_entropy=fixed)(
                torch.zeros(1, 3, dtype=torch.long), labels=torch.full((1, 3), 40)
            )
    for value in (-0.1, 1.0):
        with pytest.raises(ValueError, match="label_smoothing"):
            tiny(label_smoothing=value)


def test_the_graph_has_no_breaks():
    torch._dynamo.reset()
    logits, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, -100, 4, 0])
    compiled = torch.compile(lambda z: class_loss(z, targets, fixed=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), class_loss(logits, targets, fixed=True))
