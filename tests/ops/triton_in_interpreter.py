"""The Triton kernels in Triton's interpreter; `test_triton.py` runs this file in a process with TRITON_INTERPRET=1.

The interpreter takes milliseconds an operation, whatever its size: sequences are short, widths are not.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.cache import cache_num_bytes
from frankenstein_hf.modeling.implementations import implementation
from frankenstein_hf.modeling.ops.decayed_scan import decayed_scan
from frankenstein_hf.modeling.ops.delta_rule import delta_rule
from frankenstein_hf.modeling.ops.triton import chunk_scan

from ..tiny import assert_near, relative_rms, tiny_model, tokens

SMALL = (1, 2, 21, 5, 7)  # B, H, T, K, V: two chunks of 16, the second one short; widths below the smallest tile
WIDE = (1, 1, 18, 40, 70)  # several tiles along K and along V
MIXTURE = [0.0, -0.05, -2.0, -50.0, -float("inf")]


def loop(q, k, v, g, S, e=None, axis="key", scale=0.3):
    """Token by token, the decay written out as a factor of the whole state."""
    outputs = []
    for t in range(q.shape[2]):
        if g is not None:
            g_t = g[:, None, None] if g.dim() == 1 else g[:, :, t, None, None] if g.dim() == 3 else None
            if g_t is None:
                g_t = g[:, :, t, :, None] if axis == "key" else g[:, :, t, None, :]
            S = g_t.exp() * S
        u = v[:, :, t] if e is None else v[:, :, t] - torch.einsum("bhk,bhkv->bhv", e[:, :, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], u)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outputs, dim=2), S


def make(kind: str, gates: float | str, sizes: tuple[int, ...], erase: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    B, H, T, K, V = sizes
    shape = {"none": (), "constant": (H,), "scalar": (B, H, T), "key": (B, H, T, K), "value": (B, H, T, V)}[kind]
    g = None
    if kind != "none" and gates == "mixture":
        g = torch.tensor(MIXTURE[:-1] if erase else MIXTURE)[torch.randint(len(MIXTURE) - erase, shape)]
    elif kind != "none":
        g = gates * (0.8 + 0.4 * torch.rand(shape))
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).transpose(1, 2) for _ in range(2))
    e = torch.rand(B, H, T, 1) * k if erase else None
    return {"q": q, "k": k, "v": torch.randn(B, H, T, V), "g": g, "S": torch.randn(B, H, K, V), "e": e}


def with_gradients(function, tensors, dtype=torch.float32, parts=(0, 1)) -> dict[str, Tensor]:
    """Output, last state, and gradients of every input under random weights of the chosen ones of the first two."""
    leaves = {name: None if x is None else x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
    results = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in results]
    given = {name: x for name, x in leaves.items() if x is not None}
    chosen = [results[i] for i in parts]
    grads = torch.autograd.grad(chosen, given.values(), [weights[i] for i in parts], materialize_grads=True)
    return {"output": results[0], "state": results[1], **dict(zip(given, grads))}


def kernels(axis="key", **options):
    def run(q, k, v, g, S, e):
        options_ = dict(scale=0.3, initial_state=S, output_final_state=True, chunk_size=16, implementation="triton")
        if e is None:
            return decayed_scan(q, k, v, g, decay_axis=axis, **options_ | options)
        return delta_rule(q, k, e, v, g, **options_ | options)

    return run


def check(kind, gates, sizes, erase, parts=(0, 1), tensors=None):
    axis = "value" if kind == "value" else "key"
    tensors = make(kind, gates, sizes, erase) if tensors is None else tensors
    expected = with_gradients(lambda **x: loop(axis=axis, **x), tensors, torch.float64, parts)
    actual = with_gradients(kernels(axis), tensors, parts=parts)
    largest = max(x.norm().item() for name, x in expected.items() if name not in ("output", "state"))
    for name, x in expected.items():
        assert actual[name].isfinite().all(), name
        x = x.nan_to_num(0.0)  # 0 · inf, where a gate is -inf
        # a gradient may be tiny as a whole, as that of a decay that forgets everything is
        assert (actual[name] - x).norm() <= 2e-6 * x.norm() + 1e-9 * largest, name


SCALAR = [
    *((kind, gates) for kind in ("constant", "scalar") for gates in (-0.05, -50.0, "mixture")),
    ("none", 0.0),
    ("scalar", 0.0),
    ("scalar", -2.0),
]


@pytest.mark.parametrize("kind, gates", SCALAR)
def test_decayed_scan_with_a_decay_per_head(kind, gates):
    check(kind, gates, SMALL, erase=False)


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("gates", [-0.05, -50.0, "mixture"])
def test_decayed_scan_with_a_decay_per_channel(kind, gates):
    check(kind, gates, SMALL, erase=False)


@pytest.mark.parametrize("kind, gates", [x for x in SCALAR if x[0] != "constant"])
def test_delta_rule_with_a_decay_per_head(kind, gates):
    check(kind, gates, SMALL, erase=True)


@pytest.mark.parametrize("gates", [-0.05, -50.0, "mixture"])
def test_delta_rule_with_a_decay_per_key(gates):
    check("key", gates, SMALL, erase=True)


@pytest.mark.parametrize("kind, erase", [("scalar", False), ("scalar", True), ("key", False), ("key", True)])
def test_widths_of_several_tiles(kind, erase):
    check(kind, "mixture", WIDE, erase)


def test_the_same_key_written_again_and_again():
    tensors = make("scalar", 0.0, SMALL, erase=True)
    tensors["k"] = tensors["k"][:, :, :1].expand_as(tensors["k"])
    tensors["e"] = tensors["k"]
    check("scalar", 0.0, SMALL, True, tensors=tensors)


@pytest.mark.parametrize("parts", [(0,), (1,)], ids=["output", "state"])
@pytest.mark.parametrize("kind, erase", [("scalar", True), ("value", False)])
def test_only_the_output_or_only_the_state_is_used(kind, erase, parts):
    check(kind, -0.05, SMALL, erase, parts)


@pytest.mark.parametrize("kind, erase", [("scalar", True), ("key", False), ("value", False)])
def test_long_inputs_go_in_segments(kind, erase, monkeypatch):
    monkeypatch.setattr(chunk_scan, "SEGMENT_BYTES", 1)  # a chunk each
    check(kind, -0.05, SMALL, erase)


@pytest.mark.parametrize("kind, erase", [("scalar", False), ("scalar", True), ("key", False), ("key", True)])
def test_later_tokens_change_no_earlier_output(kind, erase):
    tensors = make(kind, -0.05, SMALL, erase)
    before, _ = kernels()(**tensors)
    changed = {name: x.clone() for name, x in tensors.items() if x is not None} | {"e": None}
    for name in "qkvg" + "e" * erase:
        changed[name] = tensors[name].clone()
        changed[name][:, :, 9:] = -3.0
    after, _ = kernels()(**changed)
    assert torch.equal(after[:, :, :9], before[:, :, :9])
    assert not torch.equal(after[:, :, 9], before[:, :, 9])


@pytest.mark.parametrize("kind, erase", [("scalar", False), ("scalar", True), ("key", False)])
def test_half_precision_inputs(kind, erase):
    tensors = {name: x if x is None else x.bfloat16() for name, x in make(kind, -0.05, SMALL, erase).items()}
    expected = with_gradients(loop, tensors, torch.float64)
    actual = with_gradients(kernels(), tensors, torch.bfloat16)
    assert actual["output"].dtype == torch.bfloat16 and actual["state"].dtype == torch.float32
    for name, x in expected.items():
        assert relative_rms(actual[name], x) < 1e-2, name


# models --------------------------------------------------------------------------------------------------------------


def pair(name: str, is_causal: bool = True):
    model, expected = (tiny_model(name, is_causal, attn_implementation=impl) for impl in ("triton", "sdpa"))
    expected.load_state_dict(model.state_dict())
    return model, expected


@pytest.mark.parametrize("name", [s.name for s in MIXERS if getattr(implementation(s), "needs_kernel", False)])
def test_every_mixer_computes_the_same_as_under_sdpa(name):
    is_causal = MIXERS.get(name).causal
    model, expected = pair(name, is_causal)
    x = tokens(1, 6)
    with torch.no_grad():
        assert relative_rms(model(x).logits, expected(x).logits) < 1e-5


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_models_train_and_decode_as_under_sdpa(name, is_causal):
    model, expected = pair(name, is_causal)
    x, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    model.train().gradient_checkpointing_enable()
    losses = [m(x, attention_mask=mask, labels=x).loss for m in (model, expected)]
    assert_near(*losses)
    for loss in losses:
        loss.backward()
    gradients = {key: p.grad for key, p in expected.named_parameters() if p.grad is not None}
    for key, p in model.named_parameters():
        if key in gradients:
            assert relative_rms(p.grad, gradients[key]) < 1e-4, key
    model.eval()
    packed = {"position_ids": torch.tensor([[*range(5), *range(4)]])}
    with torch.no_grad():
        assert_near(model(x[:1], **packed).logits, expected(x[:1], **packed).logits)
        if is_causal:
            first, second = (m(x[:, :7], attention_mask=mask[:, :7]) for m in (model, expected))
            for t in (7, 8):
                first, second = (
                    m(x[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=y.cache)
                    for m, y in ((model, first), (expected, second))
                )
                assert_near(first.logits, second.logits)
            assert cache_num_bytes(first.cache) == cache_num_bytes(second.cache)
