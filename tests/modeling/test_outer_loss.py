"""Losses computed outside the model: Trainer's label smoothing, reward models."""

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import frankenstein_hf as fhf
from frankenstein_hf.data import CausalLMCollator
from frankenstein_hf.modeling import modeling_frankenstein

from ..tiny import tiny_config, tiny_model, tiny_tokenizer, tokens

LENGTHS = (5, 3, 6)


def smoothed(model, document, epsilon):
    """Sum over a document of the smoothed losses, written out, and how many there are."""
    log_p = model(document).logits[0, :-1].log_softmax(-1)
    own = -log_p.gather(1, document[0, 1:, None]).sum()
    return (1 - epsilon) * own - epsilon * log_p.mean(-1).sum(), document.shape[1] - 1


@pytest.mark.parametrize("collate", ["ours", "ours with labels", "transformers"])
def test_label_smoothing_predicts_nothing_across_packed_borders(collate, tmp_path):
    model = tiny_model(["gla", "standard"]).train()
    documents = [tokens(1, n, seed=n) for n in LENGTHS]
    row = torch.cat(documents, dim=1)[0].tolist()
    if collate == "transformers":
        collator = DataCollatorWithFlattening()
        rows = [{"input_ids": document[0].tolist()} for document in documents]
    else:
        collator = CausalLMCollator(tiny_tokenizer())
        rows = [{"input_ids": row, "position_ids": [p for n in LENGTHS for p in range(n)]}]
        rows[0] |= {"labels": row} if collate == "ours with labels" else {}
    batch = collator(rows)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.2, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    losses, counts = zip(*(smoothed(model, document, 0.2) for document in documents))
    loss = trainer.compute_loss(model, {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)})
    torch.testing.assert_close(loss, sum(losses) / sum(counts), rtol=1e-5, atol=1e-6)


def test_packed_rows_without_labels_warn_once_that_borders_are_the_callers(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_frankenstein.logger, "warning_once", said.append)
    model, x = tiny_model("gla"), tokens(1, 6)
    packed = dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    model(x, **packed)
    model.train()(x)
    model(x, labels=x, **packed)
    assert not said
    model(x, **packed)
    assert len(said) == 1 and "first token of every document" in said[0] and "CausalLMCollator" in said[0]


class Rewards(nn.Module):
    """How TRL's RewardTrainer calls its model: chosen and rejected in one batch, use_cache=False, no labels."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        chosen, rejected = self.model(**inputs, use_cache=False).logits.squeeze(-1).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("pattern", ["gla", "standard"])
def test_a_reward_model_is_called_as_trl_does(pattern):
    model = fhf.FrankensteinForSequenceClassification(tiny_config(pattern, num_labels=1))
    x = tokens(4, 7)
    loss = Rewards(model)(input_ids=x, attention_mask=torch.ones_like(x))
    loss.backward()
    assert loss.isfinite() and model.classifier.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_trls_reward_trainer_trains(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = fhf.FrankensteinForSequenceClassification(tiny_config("gla", num_labels=1, pad_token_id=0))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "t3"
    rows = datasets.Dataset.from_dict({"chosen": ["t4 t5 t6", "t7 t8"], "rejected": ["t9 t10", "t11 t12 t13"]})
    arguments = trl.RewardConfig(tmp_path, max_steps=2, report_to=[], use_cpu=True, bf16=False, fp16=False)
    trainer = trl.RewardTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    assert trainer.train().training_loss > 0
