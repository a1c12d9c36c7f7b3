"""Collators: what is masked, how much, when; and that packing changes no document's loss."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from frankenstein_hf import FrankensteinConfig
from frankenstein_hf.data import CausalLMCollator, MaskedLMCollator, MaskRateSchedule, mask_once, pack
from frankenstein_hf.data.baseline import unigram_loss
from frankenstein_hf.modeling.modeling_frankenstein import FrankensteinForCausalLM, FrankensteinForMaskedLM

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "layer_pattern": ["gla", "standard"]}


def _rows(tokenizer, texts, packing="none", block_size=64):
    dataset = pack(Dataset.from_dict({"text": texts}), tokenizer, block_size, packing)
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_every_document_gets_its_share_of_labels_and_special_tokens_none(mlm_tokenizer, texts, packing):
    rows = _rows(mlm_tokenizer, [*texts, "x"], packing)  # "x" has one ordinary token, which must get a label
    batch = MaskedLMCollator(mlm_tokenizer, 0.15)(rows)
    originals = torch.cat([torch.tensor(row["input_ids"]) for row in rows])
    real = batch["attention_mask"].bool() if packing == "none" else torch.ones_like(batch["labels"], dtype=torch.bool)
    labels = batch["labels"][real]
    chosen = labels != -100
    assert (batch["labels"][~real] == -100).all()
    assert torch.equal(labels[chosen], originals[chosen])
    assert torch.equal(batch["input_ids"][real][~chosen], originals[~chosen])
    special = torch.isin(originals, torch.tensor(mlm_tokenizer.all_special_ids))
    assert not (special & chosen).any()
    documents = (originals == mlm_tokenizer.cls_token_id).cumsum(0) - 1
    for document in documents.unique():
        ordinary = int((~special & (documents == document)).sum())
        assert int(chosen[documents == document].sum()) == max(1, round(0.15 * ordinary))


def test_chosen_tokens_are_hidden_swapped_and_kept_in_the_asked_proportions(mlm_tokenizer):
    ids = torch.randint(len(mlm_tokenizer.all_special_ids), len(mlm_tokenizer), (50, 400)).tolist()
    batch = MaskedLMCollator(mlm_tokenizer, 0.5, 0.6, 0.3)([{"input_ids": row} for row in ids])
    chosen = batch["labels"] != -100
    assert int(chosen.sum()) == 50 * 200
    hidden = batch["input_ids"][chosen] == mlm_tokenizer.mask_token_id
    kept = batch["input_ids"][chosen] == batch["labels"][chosen]
    assert abs(hidden.float().mean() - 0.6) < 0.02
    assert abs(kept.float().mean() - 0.1) < 0.02  # and a few that were swapped for themselves
    swapped = batch["input_ids"][chosen][~hidden & ~kept]
    assert not torch.isin(swapped, torch.tensor(mlm_tokenizer.all_special_ids)).any()
    places = chosen.float().mean(0)
    assert places.min() > 0.2 and places.max() < 0.8  # everywhere in the row


def test_masks_change_from_batch_to_batch_and_depend_on_the_seed_only(mlm_tokenizer, texts):
    rows = _rows(mlm_tokenizer, texts)
    first, again, other = (MaskedLMCollator(mlm_tokenizer, seed=seed) for seed in (1, 1, 2))
    one, two = first(rows)["labels"], first(rows)["labels"]
    torch.manual_seed(99)
    assert torch.equal(again(rows)["labels"], one) and torch.equal(again(rows)["labels"], two)
    assert not torch.equal(one, two) and not torch.equal(other(rows)["labels"], one)


def test_fixed_masks_survive_another_batch_size_and_the_collator(mlm_tokenizer, texts):
    collator = MaskedLMCollator(mlm_tokenizer, 0.4)
    dataset = pack(Dataset.from_dict({"text": texts}), mlm_tokenizer, 32)
    masked = mask_once(dataset, collator, 0.25, seed=3)
    whole = collator([masked[i] for i in range(6)])
    halves = [collator([masked[i] for i in part]) for part in ((0, 1, 2), (3, 4, 5))]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name])
    assert mask_once(dataset.select(range(3)), collator, 0.25, seed=3)["labels"] == masked.select(range(3))["labels"]
    assert mask_once(dataset, collator, 0.25, seed=4)["labels"] != masked["labels"]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.3), ("cosine", 0.3)])
def test_a_schedule_runs_from_start_to_end(shape, middle):
    rate = MaskRateSchedule(0.5, 0.1, shape)
    assert [round(rate(step, 11), 6) for step in (0, 5, 10, 99)] == [0.5, middle, 0.1, 0.1]
    quarter = rate(2, 9)
    assert quarter == pytest.approx(0.4 if shape == "linear" else 0.5 - 0.4 * (1 - 0.5**0.5) / 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_n_has_the_rate_and_the_mask_of_step_n_in_any_process_and_after_a_resume(mlm_tokenizer, workers):
    class State:
        max_steps, global_step = 8, 0

    class Arguments:
        gradient_accumulation_steps, dataloader_num_workers = 2, workers

    def counts(step, batches):
        collator = MaskedLMCollator(mlm_tokenizer, MaskRateSchedule(0.8, 0.1))
        callback, state = collator.callback(), State()
        state.global_step = step
        callback.on_train_begin(Arguments, state, None)
        callback.on_epoch_begin(Arguments, state, None)
        rows = [{"input_ids": [10] * 1000}] * batches
        return [batch["labels"] for batch in DataLoader(rows, 1, collate_fn=collator, num_workers=workers)]

    full = counts(0, 16)
    assert [(labels != -100).sum().item() for labels in full] == [n for n in range(800, 0, -100) for _ in range(2)]
    reference = MaskedLMCollator(mlm_tokenizer, MaskRateSchedule(0.8, 0.1), total_steps=8)
    reference.accumulation = 2
    for labels in full:  # what plain calls, in order, would give
        assert torch.equal(labels, reference([{"input_ids": [10] * 1000}])["labels"])
    for labels, resumed in zip(full[10:], counts(5, 6), strict=True):
        assert torch.equal(labels, resumed)


def test_bad_rates_and_tokenizers_are_refused(mlm_tokenizer, clm_tokenizer):
    with pytest.raises(ValueError, match=r"mask_rate=1\.5"):
        MaskedLMCollator(mlm_tokenizer, 1.5)
    with pytest.raises(ValueError, match="no mask token"):
        MaskedLMCollator(clm_tokenizer)
    with pytest.raises(ValueError, match="add up"):
        MaskedLMCollator(mlm_tokenizer, 0.1, 0.8, 0.3)
    with pytest.raises(ValueError, match="callback"):
        MaskedLMCollator(mlm_tokenizer, MaskRateSchedule(0.3, 0.1))([{"input_ids": [9, 9]}])
    with pytest.raises(ValueError, match=r"mask_rate\(0, 4\)=7"):
        MaskedLMCollator(mlm_tokenizer, lambda step, total: 7.0, total_steps=4)([{"input_ids": [9, 9]}])


def test_the_loss_of_packed_documents_is_that_of_padded_ones(clm_tokenizer, mlm_tokenizer, texts):
    causal = CausalLMCollator(clm_tokenizer)
    model = FrankensteinForCausalLM(FrankensteinConfig(vocab_size=len(clm_tokenizer), **SIZES)).eval()
    padded = causal(_rows(clm_tokenizer, texts[:12]))
    packed = causal(_rows(clm_tokenizer, texts[:12], "documents"))
    assert "attention_mask" not in packed and packed["input_ids"].shape[0] == 1
    assert packed["input_ids"].numel() < padded["input_ids"].numel()
    torch.testing.assert_close(model(**packed).loss, model(**padded).loss, rtol=1e-5, atol=1e-5)

    encoder = FrankensteinForMaskedLM(FrankensteinConfig(vocab_size=len(mlm_tokenizer), **SIZES)).eval()
    collator = MaskedLMCollator(mlm_tokenizer, seed=5)
    packed = copy.deepcopy(collator)(_rows(mlm_tokenizer, texts[:12], "documents"))
    edges = [*(packed["position_ids"][0] == 0).nonzero().flatten().tolist(), packed["labels"].numel()]
    columns = {name: packed[name][0].tolist() for name in ("input_ids", "labels")}
    rows = [{name: values[a:b] for name, values in columns.items()} for a, b in pairwise(edges)]
    padded = collator(rows)  # the same masks, padded
    assert len(rows) == 12
    torch.testing.assert_close(encoder(**packed).loss, encoder(**padded).loss, rtol=1e-5, atol=1e-5)


def test_pads_and_their_side_and_multiple(clm_tokenizer):
    tokenizer = copy.deepcopy(clm_tokenizer)
    tokenizer.padding_side = "left"
    batch = CausalLMCollator(tokenizer, pad_to_multiple_of=4)(
        [{"input_ids": [7, 8, 9]}, {"input_ids": [7, 8, 9, 7, 8]}]
    )
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].tolist() == [[0] * 5 + [1] * 3, [0] * 3 + [1] * 5]
    assert batch["labels"][0].tolist() == [-100] * 5 + [7, 8, 9]


def test_unigram_loss_is_the_cross_entropy_of_the_counts():
    train = Dataset.from_dict({"input_ids": [[0, 1, 1, 2], [1, 1]]})
    p = np.array([2, 5, 2, 1]) / 10
    causal = Dataset.from_dict({"input_ids": [[3, 1, 0]]})
    assert unigram_loss(train, causal, 4) == pytest.approx(-np.log(p[[1, 0]]).mean())
    packed = Dataset.from_dict({"input_ids": [[3, 1, 0, 2]], "position_ids": [[0, 1, 0, 1]]})
    assert unigram_loss(train, packed, 4) == pytest.approx(-np.log(p[[1, 2]]).mean())
    masked = Dataset.from_dict({"input_ids": [[9, 9, 9]], "labels": [[-100, 2, 3]]})
    assert unigram_loss(train, masked, 4, never=[0]) == pytest.approx(-np.log(np.array([2, 1]) / 8).mean())
