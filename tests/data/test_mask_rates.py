"""Mask rates of diffusion training, the collator that draws them, and nucleotide data."""

import gzip
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from frankenstein_hf.data import (
    RATE_DISTRIBUTIONS,
    DiffusionCollator,
    GeometricNoise,
    dna_tokenizer,
    mask_once,
    read_fasta,
)
from frankenstein_hf.data.dna import IUPAC

from .test_collators import _rows

MANY = 40_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cdf(name, x):
    """The distribution function, from its density or its formula."""
    if name == "betalinear30":  # Beta(3, 9): the chance that at least 3 of 11 uniforms are below x
        beta = sum(math.comb(11, k) * x**k * (1 - x) ** (11 - k) for k in range(3, 12))
        return 0.8 * beta + 0.2 * x
    return {
        "cosine": 1 - 2 / math.pi * math.acos(x),
        "sqrt_esm": 1 - (1 - x) ** 2,
        "sqrt_odyssey": x * x,
    }[name]


@pytest.mark.parametrize("name", list(RATE_DISTRIBUTIONS))
def test_rates_follow_their_distribution(name):
    rates = RATE_DISTRIBUTIONS[name].draw(MANY, generator()).sort().values
    assert rates.min() >= 0 and rates.max() <= 1
    places = np.linspace(0.02, 0.98, 25)
    gaps = [abs(float((rates <= x).double().mean()) - cdf(name, x)) for x in places]
    assert max(gaps) < 1.95 / math.sqrt(MANY)  # Kolmogorov–Smirnov, one in a thousand
    assert abs(float(rates.mean()) - RATE_DISTRIBUTIONS[name].mean) < 4 * float(rates.std()) / math.sqrt(MANY)


def test_means_are_the_published_ones():
    means = {name: round(rate.mean, 3) for name, rate in RATE_DISTRIBUTIONS.items()}
    assert means == {"betalinear30": 0.3, "cosine": 0.637, "sqrt_esm": 0.333, "sqrt_odyssey": 0.667}


def test_geometric_noise_weighs_every_length_of_text_alike():
    """∫ σ′(t) a(t) (1 − e^{−σ̄}) dt = e^{−σ_min} − e^{−σ_max}: the bound is the usual one of masked diffusion."""
    noise = GeometricNoise(1e-4, 20.0, first=0.0)
    time = torch.linspace(0, 1, 200_001, dtype=torch.double)
    at = noise.at(time)
    integrand = at.speed * at.rate / torch.expm1(at.total)
    assert float(torch.trapezoid(integrand, time)) == pytest.approx(math.exp(-1e-4) - math.exp(-20), rel=1e-6)
    numeric = torch.gradient(at.total, spacing=(time,))[0][1:-1]
    assert torch.allclose(at.speed[1:-1], numeric, rtol=1e-6)
    drawn = noise.draw(MANY, generator())
    assert drawn.total.min() >= 1e-4 and drawn.total.max() <= 20


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_every_document_is_hidden_at_a_rate_of_its_own(mlm_tokenizer, texts, packing):
    rows = _rows(mlm_tokenizer, [text * 4 for text in texts], packing, 512)
    collator = DiffusionCollator(mlm_tokenizer, schedule="cosine")
    batch = collator(rows)
    chosen = batch["labels"] != -100
    assert torch.equal(batch["input_ids"] == mlm_tokenizer.mask_token_id, chosen)  # all of them, none swapped
    assert torch.equal(DiffusionCollator(mlm_tokenizer, schedule="cosine")(rows)["labels"], batch["labels"])
    ids = torch.where(chosen, batch["labels"], batch["input_ids"])
    special = torch.isin(ids, torch.tensor(mlm_tokenizer.all_special_ids))
    assert not (special & chosen).any()
    documents = ((ids == mlm_tokenizer.cls_token_id).flatten().cumsum(0) - 1).view_as(ids)
    shares = [float(chosen[(documents == d) & ~special].double().mean()) for d in documents.unique()]
    assert max(shares) - min(shares) > 0.2 and min(shares) > 0


def test_the_range_of_rates_and_documents_without_a_draw(mlm_tokenizer):
    rows = _rows(mlm_tokenizer, ["a b c d e f g h"] * 40)
    for low, high, at_least_one, expected in ((0, 0, True, 1), (0, 0, False, 0), (1, 1, True, None)):
        collator = DiffusionCollator(mlm_tokenizer, low=low, high=high, at_least_one=at_least_one)
        batch = collator(rows)
        counts = (batch["labels"] != -100).sum(1)
        wanted = len(rows[0]["input_ids"]) - 2 if expected is None else expected
        assert (counts == wanted).all()
    fixed = mask_once(Dataset.from_list(rows), DiffusionCollator(mlm_tokenizer), mask_rate=0.5, seed=1)
    half = round((len(rows[0]["input_ids"]) - 2) / 2)
    assert {sum(label != -100 for label in row["labels"]) for row in fixed} == {half}
    for wrong in ({"schedule": "cosin"}, {"low": 0.5, "high": 0.2}, {"schedule": GeometricNoise(), "low": 0.1}):
        with pytest.raises(ValueError, match=r"schedule|low"):
            DiffusionCollator(mlm_tokenizer, **wrong)
    for wrong in ({"sigma_min": 0}, {"sigma_max": 1e-5}, {"first": 1.0}):
        with pytest.raises(ValueError, match="GeometricNoise"):
            GeometricNoise(**wrong)


def test_geometric_batches_say_how_much_noise_each_token_saw(mlm_tokenizer, texts):
    batch = DiffusionCollator(mlm_tokenizer, schedule=GeometricNoise())(_rows(mlm_tokenizer, texts))
    hidden = batch["input_ids"] == mlm_tokenizer.mask_token_id
    real = batch["attention_mask"].bool()
    assert (batch["labels"][hidden] != -100).all()
    special = torch.isin(batch["input_ids"], torch.tensor(mlm_tokenizer.all_special_ids)) & ~hidden
    assert torch.equal(batch["labels"] == -100, special | ~real)
    for name in ("noise", "noise_rate"):
        assert (batch[name] == batch[name][:, :1]).all() and (batch[name] > 0).all()
    assert torch.allclose(batch["noise_rate"], batch["noise"] * math.log(20 / 1e-4))


# ------------------------------------------------------------------ nucleotides


def test_the_tokenizer_of_nucleotides_travels(tmp_path):
    dna_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("ACGTacgtNryU-").input_ids
    assert len(ids) == 13 + 2 and ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ACGTACGTNRYU-"
    assert ids[1:5] == ids[5:9] and tokenizer.unk_token_id not in ids
    assert tokenizer("AXZ").input_ids[2:4] == [tokenizer.unk_token_id] * 2
    assert tokenizer("A[MASK]G").input_ids[2] == tokenizer.mask_token_id
    assert len(tokenizer) == len(IUPAC) + 5 and set(IUPAC) <= set(tokenizer.get_vocab())


def test_fasta_is_read_record_by_record(tmp_path):
    text = "; made by hand\n>one first of two\nACGT\n\nacgtN\n>two\nGG\n>empty\n"
    (tmp_path / "a.fa").write_text(text)
    with gzip.open(tmp_path / "a.fa.gz", "wt") as file:
        file.write(text)
    expected = [("one", "first of two", "ACGTacgtN"), ("two", "", "GG"), ("empty", "", "")]
    for name in ("a.fa", "a.fa.gz"):
        assert list(read_fasta(tmp_path / name)) == expected
    for wrong, message in (
        ("ACGT\n", "line 1: FASTA begins"),
        (">a\nAC\nAX!\n", "line 3: '!', 'X' is no code"),
        (">\nAC\n", "line 1: a sequence without a name"),
    ):
        (tmp_path / "b.fa").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            list(read_fasta(tmp_path / "b.fa"))
