"""The heads: pads, pooling, losses, labels, loading. Parametrised over the one list of heads."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import MultipleChoiceModelOutput

import frankenstein_hf as fhf
from frankenstein_hf.modeling.hub_bundle import HEADS

from ..heads import CHOICES, NUM_LABELS, head_batch, head_model
from ..tiny import VOCAB, assert_near, tiny_config, tiny_model, tokens

PATTERN = ["gated_deltanet", "swa", "standard"]
POOLINGS = ("cls", "mean", "last")
POOLED = ("AutoModelForSequenceClassification", "AutoModelForMultipleChoice")
CLASSIFIERS = sorted(name for name, place in HEADS.items() if "_heads." in place)
PADDINGS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 0, 0, 0],
    "interior": [1, 0, 1, 1, 0, 0, 1, 1, 1],
    "all": [0, 1, 1, 0, 1, 1, 1, 1, 0],
}
every_head = pytest.mark.parametrize("auto_name", sorted(HEADS))
every_classifier = pytest.mark.parametrize("auto_name", CLASSIFIERS)
Model = Any


def each_head_and_pooling() -> list[tuple[str, str | None]]:
    return [(name, pooling) for name in sorted(HEADS) for pooling in (POOLINGS if name in POOLED else (None,))]


def biased_model(auto_name: str, **changes: Any) -> Model:
    """A model whose states at pads are not zero, as they are without biases."""
    model = head_model(auto_name, PATTERN, norm="layer_norm", attention_bias=True, mlp_bias=True, **changes).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def choices(auto_name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` [1, T, …] with an axis of choices for the head that wants one."""
    return x[:, None].repeat_interleave(CHOICES, 1) if auto_name.endswith("MultipleChoice") else x


def answers(output: Any, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What a model says about the real tokens of a batch of one, or about the row."""
    if "start_logits" in output:
        said = [output.start_logits, output.end_logits]
    else:
        said = [output["logits" if "logits" in output else "last_hidden_state"]]
    if mask is not None:
        said = [x[mask.bool()][None] if x.shape[:2] == mask.shape else x for x in said]
    return said


def assert_same_answers(actual: Any, expected: Any) -> None:
    """Bit for bit; but a product with a matrix of one row depends by a rounding on where the matrix lies in memory."""
    for a, e in zip(answers(actual), answers(expected), strict=True):
        if isinstance(actual, MultipleChoiceModelOutput):
            assert_near(a, e, rtol=5e-7, atol=1e-7)
        else:
            assert torch.equal(a, e)


# ---------------------------------------------------------------------- pads and packing


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("auto_name, pooling", each_head_and_pooling())
def test_pads_change_no_answer_wherever_they_are(auto_name, pooling, is_causal):
    model = biased_model(auto_name, is_causal=is_causal, classifier_pooling=pooling)
    real = tokens(1, 6)
    for length in (6, 1):
        expected = answers(model(choices(auto_name, real[:, :length])))
        for padding in PADDINGS.values():
            mask = torch.tensor([padding])
            if length == 1:
                mask = mask * (torch.arange(9) == mask[0].nonzero()[0])
            x = tokens(1, 9, seed=9)
            x[mask.bool()] = real[0, :length]
            embeds = model.get_input_embeddings()(x).masked_fill(~mask.bool()[..., None], float("nan"))
            inputs = {"attention_mask": choices(auto_name, mask)}
            for given in ({"input_ids": x}, {"inputs_embeds": embeds}):
                given = {name: choices(auto_name, value) for name, value in given.items()}
                actual = model(**given, **inputs)
                assert all(x.isfinite().all() for x in answers(actual))
                for a, e in zip(answers(actual, mask), expected, strict=True):
                    assert_near(a, e)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pooling", [*POOLINGS, None])
def test_pooling_takes_the_first_the_last_or_the_mean_of_the_real_tokens(pooling, is_causal):
    model = biased_model(POOLED[0], is_causal=is_causal, classifier_pooling=pooling)
    x, mask = tokens(4, 9), torch.tensor(list(PADDINGS.values()))
    output = model(x, attention_mask=mask, output_hidden_states=True)
    weight, bias = model.classifier.weight, model.classifier.bias
    for row in range(4):
        real = [output.hidden_states[-1][row, t] for t in range(9) if mask[row, t]]
        kind = pooling or ("last" if is_causal else "mean")
        pooled = {"cls": real[0], "last": real[-1], "mean": sum(real) / len(real)}[kind]
        assert_near(output.logits[row], weight @ pooled + bias)


@every_classifier
def test_pad_tokens_without_a_mask_are_read_with_a_warning(auto_name, caplog):
    model = head_model(auto_name, "gla", pad_token_id=0).eval()
    x = choices(auto_name, torch.tensor([[5, 6, 0, 0]]))
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        transformers.utils.logging.warning_once.cache_clear()
        model(x, attention_mask=torch.ones_like(x))
        assert not caplog.records
        model(x)
        assert "attention_mask" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@every_head
def test_a_row_of_pads_only_stays_finite_gradients_too(auto_name):
    model = head_model(auto_name, PATTERN)
    batch = head_batch(auto_name, 3, 8)
    mask = batch["attention_mask"].clone()
    mask[0] = 0
    batch["attention_mask"] = mask
    if "start_positions" in batch:  # no place of such a row can be an answer
        batch["start_positions"][0] = batch["end_positions"][0] = 8
    output = model(**batch)
    assert all((x + x).isfinite().all() for x in answers(output))  # scores of both ends are added up
    output[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_token_labels_of_packed_documents_equal_those_of_separate_rows():
    model = head_model("AutoModelForTokenClassification", PATTERN, is_causal=False).eval()
    a, b = tokens(1, 5), tokens(1, 4, seed=3)
    packed, positions = torch.cat([a, b], 1), torch.tensor([[*range(5), *range(4)]])
    labels = packed % NUM_LABELS
    output = model(packed, position_ids=positions, labels=labels)
    assert_near(output.logits, torch.cat([model(a).logits, model(b).logits], 1))
    separate = 5 * model(a, labels=a % NUM_LABELS).loss + 4 * model(b, labels=b % NUM_LABELS).loss
    assert_near(output.loss, separate / 9)


@pytest.mark.parametrize("auto_name", [name for name in CLASSIFIERS if "Token" not in name])
def test_heads_with_one_answer_a_row_refuse_packed_rows_and_caches(auto_name):
    model, x = head_model(auto_name, PATTERN, is_causal=True).eval(), choices(auto_name, tokens(1, 9))
    positions = choices(auto_name, torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]))
    with pytest.raises(ValueError, match="row of its own"):
        model(x, position_ids=positions)
    with pytest.raises(ValueError, match="row of its own"):
        model(x, seq_idx=(positions.cumsum(-1) > 10).long())
    with pytest.raises(ValueError, match="all tokens at once"):
        model(x, past_key_values=transformers.DynamicCache())
    for plain in (torch.arange(9), torch.arange(3, 12)):  # one document, wherever it starts
        expected = answers(model(x))
        for a, e in zip(answers(model(x, position_ids=choices(auto_name, plain[None]))), expected):
            assert torch.equal(a, e)


# ---------------------------------------------------------------------- losses


def log_softmax(scores: list[float]) -> list[float]:
    total = math.log(sum(math.exp(score) for score in scores))
    return [score - total for score in scores]


def cross_entropy(rows: torch.Tensor, labels: torch.Tensor) -> float:
    terms = [-log_softmax(row)[label] for row, label in zip(rows.tolist(), labels.tolist()) if label != -100]
    return sum(terms) / len(terms)


def test_classification_losses_are_the_textbook_ones():
    sequence = head_batch("AutoModelForSequenceClassification", 3, 8)
    sequence["labels"][1] = -100
    output = head_model("AutoModelForSequenceClassification", PATTERN)(**sequence)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, sequence["labels"]), rel=1e-5)

    token = head_batch("AutoModelForTokenClassification", 3, 8)
    output = head_model("AutoModelForTokenClassification", PATTERN)(**token)
    flat = cross_entropy(output.logits.flatten(0, 1), token["labels"].flatten())
    assert output.loss.item() == pytest.approx(flat, rel=1e-5)

    choice = head_batch("AutoModelForMultipleChoice", 3, 8)
    output = head_model("AutoModelForMultipleChoice", PATTERN)(**choice)
    assert output.logits.shape == (3, CHOICES)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, choice["labels"]), rel=1e-5)


def test_the_loss_of_answers_is_that_of_both_ends_over_real_tokens_without_cut_off_rows():
    batch = head_batch("AutoModelForQuestionAnswering", 3, 8)
    batch["end_positions"][0] = 11
    output = head_model("AutoModelForQuestionAnswering", PATTERN)(**batch)
    losses = []
    for name in ("start", "end"):
        terms = []
        for row in range(3):
            position = batch[f"{name}_positions"][row].item()
            if position < 8:
                length = int(batch["attention_mask"][row].sum())  # pads on the right
                terms.append(-log_softmax(output[f"{name}_logits"][row, :length].tolist())[position])
        losses.append(sum(terms) / len(terms))
    assert output.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-5)


PROBLEMS: dict[str, tuple[int, torch.Tensor]] = {
    "regression": (1, torch.tensor([0.5, -2.0, 3.0, 0.0])),
    "regression of several": (2, torch.tensor([[0.5, -2.0], [3.0, 0.0], [1.0, 1.0], [0.0, 9.0]])),
    "single_label_classification": (3, torch.tensor([2, 0, 1, 1])),
    "multi_label_classification": (3, torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).float()),
}


def problem_model(problem: str, **changes: Any) -> Model:
    problem_type, num_labels = problem.partition(" ")[0], PROBLEMS[problem][0]
    changes = {"problem_type": problem_type, **changes}
    return fhf.FrankensteinForSequenceClassification(tiny_config(PATTERN, num_labels=num_labels, **changes))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_type_has_its_loss_in_any_dtype_of_labels(problem):
    labels = PROBLEMS[problem][1]
    model, x = problem_model(problem), tokens(4, 7)
    output = model(x, labels=labels)
    rows, wanted = output.logits.tolist(), labels.view(4, -1).tolist()
    if problem.startswith("regression"):
        terms = [(a - b) ** 2 for row, want in zip(rows, wanted) for a, b in zip(row, want)]
        expected = sum(terms) / len(terms)
    elif problem.startswith("multi"):
        terms = [
            -math.log(1 / (1 + math.exp(-a if b else a))) for row, want in zip(rows, wanted) for a, b in zip(row, want)
        ]
        expected = sum(terms) / len(terms)
    else:
        expected = cross_entropy(output.logits, labels)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    for other in (labels.to(torch.int32), labels.long()) if (labels == labels.round()).all() else ():
        assert torch.equal(model(x, labels=other).loss, output.loss)
    if labels.dim() == 1:
        assert torch.equal(model(x, labels=labels[:, None]).loss, output.loss)
    loss = model.bfloat16()(x, labels=labels).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, rel=0.1)
    loss.backward()


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if name != "regression of several"])
def test_the_problem_type_is_inferred_kept_and_saved_but_not_written_into_the_callers_config(problem, tmp_path):
    config = tiny_config(PATTERN, num_labels=PROBLEMS[problem][0])
    model = fhf.FrankensteinForSequenceClassification(config)
    model(tokens(4, 7), labels=PROBLEMS[problem][1])
    assert model.config.problem_type == problem and config.problem_type is None
    model.save_pretrained(tmp_path, save_code=False)
    assert fhf.FrankensteinConfig.from_pretrained(tmp_path).problem_type == problem


@pytest.mark.parametrize("problem", PROBLEMS)
def test_accumulated_steps_under_trainer_equal_the_large_batch_for_every_problem_type(problem, tmp_path):
    rows = [{"input_ids": x, "labels": label} for x, label in zip(tokens(4, 7), PROBLEMS[problem][1])]
    trained = []
    for batch_size in (4, 1):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=4 // batch_size,
            max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, report_to="none", use_cpu=True,
            save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(problem_model(problem), arguments, train_dataset=rows)
        start = trainer.model.classifier.weight.detach().clone()
        logged = trainer.train().training_loss
        assert not torch.equal(trainer.model.classifier.weight, start)
        trained.append([torch.tensor(logged), *(p.detach() for p in trainer.model.parameters())])
    for large, small in zip(*trained):
        assert_near(small, large)


@every_classifier
def test_num_items_in_batch_divides_the_sum_over_rows(auto_name):
    model, batch = head_model(auto_name, PATTERN), head_batch(auto_name, 4, 8)
    whole = model(**batch).loss
    total = 4 if "labels" not in batch else (batch["labels"] != -100).sum()
    parts = [model(**{k: v[i : i + 1] for k, v in batch.items()}, num_items_in_batch=total).loss for i in range(4)]
    assert_near(sum(parts), whole)


@every_classifier
def test_losses_of_half_precision_models_are_computed_in_full(auto_name):
    model, batch = head_model(auto_name, PATTERN), head_batch(auto_name, 3, 8)
    expected = model(**batch).loss.item()
    loss = model.bfloat16()(**batch).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, rel=0.1)
    loss.backward()


@every_classifier
def test_auxiliary_losses_of_mixers_are_added(auto_name, monkeypatch):
    model, batch = head_model(auto_name, PATTERN).train(), head_batch(auto_name, 3, 8)
    before = model(**batch).loss
    run = model.model.forward

    def with_auxiliary_loss(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        output.aux_losses = {"one": torch.tensor(1.0), "two": torch.tensor(1.5)}
        return output

    monkeypatch.setattr(model.model, "forward", with_auxiliary_loss)
    assert_near(model(**batch).loss, before + 2.5)
    assert_near(model.eval()(**batch).loss, before)  # so that evaluations stay comparable


# ---------------------------------------------------------------------- bad labels

BAD_LABELS: list[tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = [
    ("SequenceClassification", {}, {"labels": torch.tensor([0, 3])}, r"from 0 to 2.*got \[3\].*num_labels"),
    ("SequenceClassification", {}, {"labels": torch.tensor([0, -1])}, r"got \[-1\]"),
    ("SequenceClassification", {}, {"labels": torch.tensor([0, 1, 1])}, r"must be \[2\], got \[3\]"),
    ("SequenceClassification", {}, {"labels": torch.tensor([[0, 1, 1], [1, 0, 0]])}, "multi_label_classification"),
    ("SequenceClassification", {}, {"labels": torch.tensor([0.0, 1.0])}, r"\[2, 3\].*got \[2\]"),
    ("SequenceClassification", {"problem_type": "single_label_classification"}, {"labels": torch.zeros(2)}, "float32"),
    ("SequenceClassification", {"num_labels": 1}, {"labels": torch.zeros(2, 2)}, r"\[2, 1\] or \[2\].*got \[2, 2\]"),
    ("SequenceClassification", {}, {"labels": torch.full((2, 3), -100.0)}, r"in \[0, 1\]"),
    ("TokenClassification", {}, {"labels": torch.full((2, 5), 7)}, r"got \[7, 7"),
    ("TokenClassification", {}, {"labels": torch.zeros(2, 4, dtype=torch.long)}, r"must be \[2, 5\], got \[2, 4\]"),
    ("TokenClassification", {}, {"labels": torch.zeros(2, 5)}, "float32"),
    ("QuestionAnswering", {}, {"start_positions": torch.tensor([1, -100]), "end_positions": torch.tensor([1, 1])},
     r"start_positions.*\[-100\]"),
    ("QuestionAnswering", {}, {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([1, 4])},
     r"end_positions.*real tokens.*\[4\]"),
    ("QuestionAnswering", {}, {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([1])}, r"\[2\] who"),
    ("MultipleChoice", {}, {"labels": torch.tensor([0, 2])}, "number of choices"),
    ("MultipleChoice", {}, {"labels": torch.tensor([[0, 1], [1, 0]])}, r"must be \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize("head, changes, labels, message", BAD_LABELS)
def test_labels_that_do_not_fit_are_refused_by_name(head, changes, labels, message):
    config = tiny_config("gla", **{"num_labels": NUM_LABELS, **changes})
    model = getattr(fhf, f"FrankensteinFor{head}")(config)
    x, mask = tokens(2, 5), torch.tensor([[1] * 5, [1] * 4 + [0]])
    if head == "MultipleChoice":
        x, mask = (value[:, None].repeat(1, 2, 1) for value in (x, mask))
    with pytest.raises(ValueError, match=message):
        model(x, attention_mask=mask, **labels)
    assert model.config.problem_type == config.problem_type  # a refused call leaves nothing behind


def test_multiple_choice_without_the_axis_of_choices_is_refused():
    with pytest.raises(ValueError, match=r"\[batch, choices, tokens\].*got \[2, 5\]"):
        fhf.FrankensteinForMultipleChoice(tiny_config("gla"))(tokens(2, 5))
    with pytest.raises(ValueError, match="exactly one"):
        fhf.FrankensteinForMultipleChoice(tiny_config("gla"))()


# ---------------------------------------------------------------------- loading and saving


@every_head
def test_a_saved_head_comes_back_bit_for_bit_with_its_labels(auto_name, tmp_path):
    names = {0: "no", 1: "maybe", 2: "yes"}
    model = head_model(auto_name, PATTERN, id2label=names, label2id={v: k for k, v in names.items()}).eval()
    model.save_pretrained(tmp_path, save_code=False)
    loaded, info = getattr(transformers, auto_name).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.id2label == names and loaded.config.num_labels == 3 and loaded.config.label2id["yes"] == 2
    assert loaded.is_causal == model.is_causal == loaded.config.is_causal
    batch = {k: v for k, v in head_batch(auto_name, 3, 8).items() if k in ("input_ids", "attention_mask")}
    assert_same_answers(loaded(**batch), model(**batch))


@pytest.mark.parametrize("is_causal", [True, False])
@every_classifier
def test_a_language_model_becomes_a_classifier_with_only_its_head_new(auto_name, is_causal, tmp_path):
    source = tiny_model(PATTERN, is_causal)
    source.save_pretrained(tmp_path, save_code=False)
    model, info = getattr(transformers, auto_name).from_pretrained(
        tmp_path, num_labels=5, problem_type="single_label_classification", output_loading_info=True
    )
    head = model.qa_outputs if "Question" in auto_name else model.classifier
    name = "qa_outputs" if "Question" in auto_name else "classifier"
    assert set(info["missing_keys"]) == {f"{name}.{kind}" for kind, _ in head.named_parameters()}
    assert model.is_causal is is_causal and model.model.is_causal is is_causal
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(tensor, source.model.state_dict()[name])
    assert model.config.num_labels == 5 and len(model.config.id2label) == 5
    assert not getattr(transformers, auto_name).from_pretrained(tmp_path, is_causal=False).model.is_causal
    assert 0 < head.weight.std() < 1 and (head.bias is None or (head.bias == 0).all())


def test_another_number_of_labels_is_refused_unless_asked_for(tmp_path):
    head_model("AutoModelForSequenceClassification", "gla").save_pretrained(tmp_path, save_code=False)
    auto = transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match=r"classifier\.weight \(\[3, 20\] saved, \[4, 20\] built\).*ignore_mismatched"):
        auto.from_pretrained(tmp_path, num_labels=4)
    assert auto.from_pretrained(tmp_path, num_labels=4, ignore_mismatched_sizes=True).classifier.out_features == 4


@every_head
def test_no_head_writes_into_the_callers_config(auto_name, tmp_path):
    config = tiny_config(PATTERN, num_labels=NUM_LABELS)
    before = config.to_dict()
    model = getattr(transformers, auto_name)._model_mapping[fhf.FrankensteinConfig](config).train()
    model(**head_batch(auto_name, 3, 8))[0].sum().backward()
    model.save_pretrained(tmp_path, save_code=False)
    assert config.to_dict() == before


# ---------------------------------------------------------------------- what transformers users switch on


@every_head
def test_hidden_states_tuples_and_configs_that_ask_for_tuples(auto_name):
    model, batch = head_model(auto_name, PATTERN).eval(), head_batch(auto_name, 3, 8)
    output = model(**batch, output_hidden_states=True)
    rows = 3 * CHOICES if auto_name.endswith("MultipleChoice") else 3
    assert [h.shape for h in output.hidden_states] == [(rows, 8, 20)] * 4
    as_tuple = model(**batch, return_dict=False)
    model.config.return_dict = False
    by_config = model(**batch)
    for other in (as_tuple, by_config):
        assert isinstance(other, tuple) and len(other) == len(output) - 1
        assert all(torch.equal(a, b) for a, b in zip(other, output.to_tuple()) if isinstance(a, torch.Tensor))


@every_head
def test_gradient_checkpointing_changes_no_gradient_of_any_head(auto_name):
    gradients = []
    for checkpointing in (False, True):
        model = head_model(auto_name, PATTERN)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**head_batch(auto_name, 3, 8))[0].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(grad is not None for grad in gradients[0].values())
    for name, grad in gradients[0].items():
        assert_near(gradients[1][name], grad)


@every_head
def test_the_vocabulary_of_every_head_can_be_resized(auto_name, tmp_path):
    model = head_model(auto_name, PATTERN).eval()
    batch = {k: v for k, v in head_batch(auto_name, 3, 8).items() if k in ("input_ids", "attention_mask")}
    expected = answers(model(**batch))
    model.resize_token_embeddings(VOCAB + 4)
    for a, e in zip(answers(model(**batch)), expected):
        assert torch.equal(a[..., : e.shape[-1]], e)
    batch["input_ids"][..., 0] = VOCAB + 3
    model.save_pretrained(tmp_path, save_code=False)
    loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
    assert_same_answers(loaded(**batch), model(**batch))


@every_classifier
def test_dropout_before_the_classifier_is_the_configs(auto_name):
    rate = 0.0 if "Question" in auto_name else 0.5
    model, batch = head_model(auto_name, "gla", classifier_dropout=0.5), head_batch(auto_name, 3, 8)
    assert [m.p for m in model.children() if isinstance(m, nn.Dropout)] == ([rate] if rate else [])
    assert torch.equal(model(**batch)[1], model(**batch)[1]) is (rate == 0)
    assert torch.equal(model.eval()(**batch)[1], model(**batch)[1])


@every_classifier
def test_a_step_with_labels_compiles_to_one_graph(auto_name):
    model, batch = head_model(auto_name, "standard"), head_batch(auto_name, 2, 9)
    batch.pop("attention_mask")
    expected = model(**batch).loss
    torch._dynamo.reset()
    actual = torch.compile(model, backend="eager", fullgraph=True)(**batch).loss
    assert torch.equal(actual, expected)


def test_choices_take_positions_for_all_and_name_a_mask_without_their_axis():
    model, batch = (
        head_model("AutoModelForMultipleChoice", PATTERN).eval(),
        head_batch("AutoModelForMultipleChoice", 2, 9),
    )
    expected = model(**batch).logits
    for places in (torch.arange(9)[None], torch.arange(9).expand(2, CHOICES, 9)):
        assert torch.equal(model(**batch, position_ids=places).logits, expected)
    with pytest.raises(ValueError, match=r"attention_mask \[batch, choices, tokens\]; got \[2, 9\]"):
        model(batch["input_ids"], attention_mask=batch["attention_mask"][:, 0])


def test_an_unknown_problem_type_is_refused_by_the_config():
    with pytest.raises(ValueError, match=r"problem_type 'multi_label'\. Allowed: multi_label_cl"):
        tiny_config("standard", problem_type="multi_label")
