"""Graphs traced once serve all batches, lengths and pads; what cannot be traced says so, naming the mixer."""

import pytest
import torch
from torch.export import Dim

import frankenstein_hf as fhf
from frankenstein_hf.export import Encoder, onnx_session
from frankenstein_hf.modeling.mixers.dense.standard import StandardAttention
from frankenstein_hf.modeling.ops.tracing import unit_lower_inverse

from ..tiny import BIDIRECTIONAL, CAUSAL, tiny_config, tiny_model, tokens

HYBRID = ["gated_deltanet", "swa", "standard", "mamba"]
HEADS = [fhf.FrankensteinForMaskedLM, fhf.FrankensteinForSequenceClassification, fhf.FrankensteinModel]
TO_ONNX = [[name] for name in ("standard", "swa", "gated_deltanet", "mamba")] + [HYBRID]
QUICK = ["standard", "swa", "mamba"]
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(batch, length, seed=length)
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    mask[-1, length - length // 4 :] = 0
    if length > 3:
        mask[-1, length // 2] = 0
    return ids, mask


def exported(model: torch.nn.Module):
    with torch.no_grad():
        return torch.export.export(Encoder(model), padded(3, 21), dynamic_shapes=(DYNAMIC, DYNAMIC), strict=False)


def slow_but(quick: list[str], names: list[str]) -> list:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in sorted(names)]


@pytest.mark.parametrize("name", slow_but(QUICK, BIDIRECTIONAL))
@torch.no_grad()
def test_an_exported_encoder_is_the_model_at_every_size_or_names_its_mixer(name):
    model = tiny_model(name, is_causal=False)
    try:
        run = exported(model).module()
    except ValueError as error:
        assert f"Layer 0 ({name!r}) cannot be exported" in str(error)
        return
    for batch, length in ((1, 1), (2, 3), (1, 33), (3, 21), (2, 90)):
        ids, mask = padded(batch, length)
        expected = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(run(ids, mask)[0][mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", slow_but([], CAUSAL))
def test_an_exported_decoding_step_is_the_model_or_names_its_mixer(name):
    try:
        fhf.export_decoding_step(tiny_model(name))  # which compares
    except ValueError as error:
        assert f"Layer 0 ({name!r}) cannot be exported" in str(error)


@torch.no_grad()
def test_a_hybrid_decodes_through_an_exported_step():
    model, ids = tiny_model(HYBRID), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    step = fhf.export_decoding_step(model).module()
    cache = fhf.decoding_cache(model)
    model(input_ids=ids[:, :7], attention_mask=mask[:, :7], cache=cache)
    cache = fhf.cache_tensors(cache)
    assert [name for name in cache if name.startswith("layers.2.")] == ["layers.2.keys", "layers.2.values"]
    for t in range(7, 12):
        logits, cache = step(ids[:, t : t + 1], mask[:, : t + 1], cache)
        torch.testing.assert_close(logits, expected[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "head"),
    [
        pytest.param(pattern, head, marks=() if (pattern, head) == (["swa"], HEADS[1]) else pytest.mark.slow)
        for pattern in TO_ONNX
        for head in HEADS
    ],
)
@torch.no_grad()
def test_onnxruntime_gives_what_the_model_gives(pattern, head, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = head(tiny_config(pattern)).train()
    session = onnx_session(fhf.export_onnx(model, tmp_path / "model.onnx"))
    assert model.training and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    encoder = Encoder(model.eval())
    for batch, length in ((1, 2), (4, 40), (2, 150)):
        ids, mask = padded(batch, length)
        actual = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        for x, expected in zip(map(torch.from_numpy, actual), encoder(ids, mask), strict=True):
            x, expected = (y[mask.bool()] if y.shape[:2] == mask.shape else y for y in (x, expected))
            assert (x - expected).abs().max() <= 1e-4 * expected.abs().max()


# ---------------------------------------------------------------------- refusals


def looks_at_values(self, x, context, cache=None):
    return original(self, 2 * x if x.abs().max() > 3 else x, context, cache)


def chooses_by_length(self, x, context, cache=None):
    return original(self, 2 * x if x.shape[1] > 8 else x, context, cache)


def loops_over_time(self, x, context, cache=None):
    return original(self, torch.stack([x[:, t] for t in range(x.shape[1])], dim=1), context, cache)


original = StandardAttention.forward


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (looks_at_values, "cannot be exported: .*data-dependent"),
        (chooses_by_length, r"would hold while s\d+ > 8, so not for sizes \[1, 1\]"),
        (loops_over_time, "works for the size 21 only"),
    ],
)
def test_a_mixer_whose_graph_would_be_wrong_for_other_input_is_refused(forward, message, monkeypatch):
    monkeypatch.setattr(StandardAttention, "forward", forward)
    with pytest.raises(ValueError, match=rf"(?s)Layer 0 \('standard'\).*{message}"):
        exported(tiny_model("standard", is_causal=False))


def test_what_tracing_would_bake_in_is_refused():
    model = tiny_model("standard", is_causal=False)
    ids, mask = padded(2, 9)
    with pytest.raises(ValueError, match=r"torch\.jit\.trace .* use torch\.export"):
        torch.jit.trace(Encoder(model), (ids, mask))
    packed = {"input_ids": ids, "position_ids": torch.arange(9)[None]}
    with pytest.raises(ValueError, match=r"Packed documents .* cannot be exported"):
        torch.export.export(model, (), packed)
    with pytest.raises(ValueError, match=r"model\.to\('cpu', torch\.float32\)"):
        fhf.export_onnx(model.to(torch.bfloat16), "nowhere.onnx")


# ---------------------------------------------------------------------- the pieces


def test_the_inverse_by_blocks_is_the_inverse():
    for size in (1, 2, 5, 16, 32):
        A = torch.randn(3, 2, size, size, dtype=torch.float64).tril(-1)
        torch.testing.assert_close(unit_lower_inverse(A), torch.linalg.inv(torch.eye(size) + A))
