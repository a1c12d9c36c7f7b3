"""`titan` against a loop that lets autograd take the memory's gradients, and against windowed attention."""

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.ops.neural_memory import MemoryState, neural_memory

from ..tiny import assert_near, relative_rms, tiny_config, tiny_model, tokens
from .run import make_mixer, run

H, W, D = 2, 10, 20
MEMORIES = [{"memory": "linear"}, {}, {"memory_depth": 3, "gate": False}]


def network(weights, x):
    for number, weight in enumerate(weights):
        x = (F.silu(x) if number else x) @ weight
    return x


def memory_loop(q, k, v, keep, eta, theta, weights, *, chunk, longest, exclude_own=False):
    """The paper's S and M of one head, [T, W] and [T]; gradients by autograd at the memory the chunk began with."""
    M, S, out = [w.clone() for w in weights], [torch.zeros_like(w) for w in weights], []
    for t in range(len(q)):
        if t % chunk == 0:
            start = [w.detach().requires_grad_() for w in M]
        with torch.enable_grad():
            loss = (network(start, k[t]) - v[t]).square().sum()
        gradients = torch.autograd.grad(loss, start)
        length = torch.cat([g.flatten() for g in gradients]).norm()
        gradients = [g * min(1.0, longest / max(length.item(), 1e-300)) for g in gradients]
        S = [eta[t] * s - theta[t] * g for s, g in zip(S, gradients)]
        M = [keep[t] * m + s for m, s in zip(M, S)]
        read = [m + theta[t] * g for m, g in zip(M, gradients)] if exclude_own else M
        out.append(network(read, q[t]))
    return torch.stack(out)


def recalled(mixer, x, exclude_own=False):
    """What the heads recall of x [T, D]: [T, H, W]."""
    p = mixer.params
    q, k, v = (F.silu(x @ getattr(mixer, f"memory_{name}_proj").weight.T).view(-1, H, W) for name in "qkv")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rates = (x @ mixer.rates_proj.weight.T + mixer.rates_proj.bias).sigmoid().view(-1, 3, H)
    keep, eta = rates[:, 0], rates[:, 1]
    theta = p.max_step * rates[:, 2] * (1 - eta)
    return torch.stack(
        [
            memory_loop(
                q[:, h], k[:, h], v[:, h], keep[:, h], eta[:, h], theta[:, h], list(mixer.memory[h]),
                chunk=p.chunk_size, longest=p.max_gradient, exclude_own=exclude_own,
            )
            for h in range(H)
        ],
        dim=1,
    )  # fmt: skip


def windowed(mixer, x, is_causal):
    """The attention alone, before the output projection."""
    twin = make_mixer("swa", {"window_size": mixer.params.window_size, "num_sinks": 0})
    twin.load_state_dict({key: value for key, value in mixer.state_dict().items() if key in twin.state_dict()})
    torch.nn.init.eye_(twin.o_proj.weight)
    return run(twin, x[None], is_causal)[0]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("params", [*MEMORIES, {"max_step": 0.4, "max_gradient": 0.5}])
def test_titan_follows_the_paper(is_causal, params):
    mixer = make_mixer("titan", {"window_size": 5, "chunk_size": 4, "max_step": 0.1} | params)
    x = torch.randn(14, D, dtype=torch.float64)
    with torch.no_grad():
        memory = recalled(mixer, x)
        if not is_causal:
            memory = memory + recalled(mixer, x.flip(0), exclude_own=True).flip(0)
        memory = memory / (memory.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
        memory = memory.flatten(1)
        if mixer.params.gate:
            memory = memory * F.silu(x @ mixer.g_proj.weight.T)
        expected = (windowed(mixer, x, is_causal) + memory) @ mixer.o_proj.weight.T
        for backend in ("eager", "sdpa"):
            assert_near(run(mixer, x[None], is_causal, backend)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_memory_titan_is_windowed_attention(is_causal):
    model = tiny_model("titan", is_causal, mixer_params={"titan": {"window_size": 5, "memory": "none"}})
    window = tiny_model("swa", is_causal, mixer_params={"swa": {"window_size": 5, "num_sinks": 0}})
    window.load_state_dict(model.state_dict())
    x = tokens(2, 20)
    assert torch.equal(model(x).logits, window(x).logits)


def test_an_mlp_of_one_matrix_is_a_linear_memory():
    x, outputs = tokens(2, 20), []
    for params in ({"memory": "linear"}, {"memory_depth": 1}):
        model = tiny_model("titan", mixer_params={"titan": params | {"chunk_size": 8}})
        outputs.append(model(x).logits)
    assert torch.equal(*outputs)


def gated_inputs(T, keep, momentum, seed=0):
    """q, k, v, log gates, the largest stable step and a linear memory, for one row."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, H, T, W, generator=g) for _ in range(3))
    logs = [torch.full((1, H, T), value) if value is not None else None for value in (keep, momentum)]
    mixture = torch.tensor([0.0, -0.05, -2.0, -50.0])
    logs = [mixture[torch.randint(4, (1, H, T), generator=g)] if x is None else x for x in logs]
    step = 0.5 / 64 * (1 - logs[1].exp())
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, *logs, step


def memory_of(depth, dtype=torch.float32):
    weight = torch.randn(1, H, depth, W, W, generator=torch.Generator().manual_seed(3)).to(dtype) * W**-0.5
    return MemoryState(weight, weight, torch.zeros_like(weight))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("keep", [0.0, -50.0, float("-inf"), None])
@pytest.mark.parametrize("momentum", [0.0, -50.0, -1e-3, None])
def test_extreme_gates_stay_finite_and_close_to_fp64(depth, keep, momentum):
    options = dict(chunk_size=64, longest=4 * W**0.5)
    inputs = [x.requires_grad_() for x in gated_inputs(200, keep, momentum)]
    y, state = neural_memory(*inputs, memory_of(depth), **options)
    y.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs) and all(x.isfinite().all() for x in state)
    loop = [
        memory_loop(
            *(x[0, h].detach().double() for x in inputs[:3]), inputs[3][0, h].detach().double().exp(),
            inputs[4][0, h].detach().double().exp(), inputs[5][0, h].detach().double(),
            list(memory_of(depth, torch.float64).now[0, h]), chunk=64, longest=4 * W**0.5,
        )
        for h in range(H)
    ]  # fmt: skip
    assert (y[0].detach() - torch.stack(loop)).abs().max() < 1e-4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("momentum", [-50.0, -0.7, -1e-2, -1e-4])
def test_one_key_repeated_at_the_largest_step_does_not_blow_up(depth, momentum):
    """4096 times the same key and value, nothing forgotten: the stale gradients of a chunk all point the same way."""
    q, k, v, keep, eta, step = gated_inputs(4096, 0.0, momentum)
    k, v = k[:, :, :1].expand_as(k).contiguous(), v[:, :, :1].expand_as(v).contiguous()
    inputs = [x.requires_grad_() for x in (q, k, v, keep, eta, step)]
    y, state = neural_memory(*inputs, memory_of(depth), chunk_size=64, longest=4 * W**0.5)
    y.square().mean().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    # the key's distance to its value never exceeds a few times the initial one
    assert y.isfinite().all() and state.now.abs().max() < 10


def test_long_sequences_in_half_precision_follow_fp64():
    for params in MEMORIES:
        mixer = make_mixer("titan", params).to(torch.bfloat16)
        x = torch.randn(1, 4096, D, dtype=torch.bfloat16)
        y = run(mixer, x)
        assert relative_rms(y, run(mixer.double(), x.double())) < 3e-2


@pytest.mark.parametrize("params", [*MEMORIES, {"memory": "none"}])
def test_rows_at_different_phases_continue_as_if_never_interrupted(params):
    """Chunks of several tokens and single ones, rows of different lengths, rollback: equal to the full forward."""
    model = tiny_model(["titan", "titan"], mixer_params={"titan": params | {"window_size": 5, "chunk_size": 4}})
    x = tokens(3, 24)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :3] = mask[1, 5:7] = mask[1, 14] = mask[2, 17:20] = 0
    with torch.no_grad():
        expected = [model(row[keep.bool()][None]).logits[0] for row, keep in zip(x, mask)]
        cache, parts = DynamicCache(config=model.config), []
        cache.activate_past_recording()
        for begin, end in ((0, 6), (6, 7), (7, 16), (16, 24)):
            model(tokens(3, 5, seed=4), cache=cache)
            cache.crop(-5)
            parts.append(model(x[:, begin:end], attention_mask=mask[:, :end], cache=cache).logits)
    for logits, keep, row in zip(torch.cat(parts, dim=1), mask, expected):
        assert_near(logits[keep.bool()], row)
    spec_floats = sum(y.numel() for y in cache.layers[0].states.values() if y.is_floating_point()) // 3
    assert spec_floats == MIXERS.get("titan").state_size(model.config.params_for(0), model.config)


def test_a_depth_without_an_mlp_is_refused():
    with pytest.raises(ValueError, match="memory_depth=3 needs memory='mlp'"):
        tiny_config("titan", mixer_params={"titan": {"memory": "linear", "memory_depth": 3}})


# ---------------------------------------------------------------------- short convolutions and persistent tokens

EVERYTHING = {"window_size": 5, "chunk_size": 4, "use_short_conv": True, "persistent_tokens": 3, "max_step": 0.1}


def convolved(x, weight):
    """Causal depthwise convolution of [T, E] with [E, taps], the last tap on the current token."""
    taps = weight.shape[1]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    return sum(padded[n : n + len(x)] * weight[:, n] for n in range(taps))


def rotated(x, positions, theta=10000.0):
    """[T, heads, W] turned by position, channel n paired with n + W/2."""
    angles = positions[:, None] * theta ** (-2.0 * torch.arange(W // 2, dtype=torch.float64) / W)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def with_everything(mixer, x, is_causal):
    """The paper's picture: persistent tokens in front of the row, convolutions, window and memory, added up."""
    p, N, G = mixer.params, len(mixer.persistent), mixer.num_key_value_heads
    row = torch.cat([mixer.persistent, x])
    weights = torch.cat([getattr(mixer, f"{name}_proj").weight for name in "qkv"])
    qkv = convolved(row @ weights.T, mixer.conv.weight).view(len(row), H + 2 * G, W)
    places = torch.arange(len(row))
    positions = (places - N).clamp_min(0)
    q, k = rotated(qkv[:, :H], positions), rotated(qkv[:, H : H + G], positions)
    k, v = (y.repeat_interleave(H // G, dim=1) for y in (k, qkv[:, H + G :]))
    distance = places[:, None] - places
    reach = p.window_size
    seen = (distance < reach) & (distance >= 0) if is_causal else distance.abs() <= reach // 2
    seen = seen | ((places < N) & (distance >= 0 if is_causal else True))
    scores = (torch.einsum("ihw,jhw->hij", q, k) / W**0.5).masked_fill(~seen, -torch.inf)
    attended = torch.einsum("hij,jhw->ihw", scores.softmax(-1), v)[N:].flatten(1)

    def recall(tokens, exclude_own=False):
        row = torch.cat([mixer.persistent, tokens])
        weights = torch.cat([getattr(mixer, f"memory_{name}_proj").weight for name in "qkv"])
        q, k, v = F.silu(convolved(row @ weights.T, mixer.memory_conv.weight)).view(len(row), 3, H, W).unbind(1)
        q, k = (y / (y.square().sum(-1, keepdims=True) + 1e-6).sqrt() for y in (q, k))
        rates = (row @ mixer.rates_proj.weight.T + mixer.rates_proj.bias).sigmoid().view(-1, 3, H)
        keep, eta = rates[:, 0], rates[:, 1]
        theta = p.max_step * rates[:, 2] * (1 - eta)
        heads = [
            memory_loop(
                q[:, h], k[:, h], v[:, h], keep[:, h], eta[:, h], theta[:, h], list(mixer.memory[h]),
                chunk=p.chunk_size, longest=p.max_gradient, exclude_own=exclude_own,
            )
            for h in range(H)
        ]  # fmt: skip
        return torch.stack(heads, dim=1)[N:]

    memory = recall(x) if is_causal else recall(x) + recall(x.flip(0), exclude_own=True).flip(0)
    memory = memory / (memory.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    memory = memory.flatten(1) * F.silu(x @ mixer.g_proj.weight.T)
    return (attended + memory) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("is_causal", [True, False])
def test_convolutions_and_persistent_tokens_follow_the_paper(is_causal):
    mixer, x = make_mixer("titan", EVERYTHING), torch.randn(14, D, dtype=torch.float64)
    with torch.no_grad():
        mixer.persistent.normal_()
        expected = with_everything(mixer, x, is_causal)
        for backend in ("eager", "sdpa"):
            assert_near(run(mixer, x[None], is_causal, backend)[0], expected, rtol=1e-5, atol=1e-5)  # fp32 angles


def test_convolutions_and_persistent_tokens_decode_pack_pad_and_roll_back():
    model, x = tiny_model(["titan"] * 2, mixer_params={"titan": EVERYTHING}), tokens(2, 20)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache, start = DynamicCache(config=model.config), 0
        for size in (2, 9, 1, 1, 7):
            assert_near(model(x[:, start : start + size], cache=cache).logits, expected[:, start : start + size])
            start += size
        layer = cache.layers[0]
        kept = sum(y.numel() for y in layer.states.values() if y.is_floating_point()) // 2
        assert kept == MIXERS.get("titan").state_size(model.config.params_for(0), model.config)
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(torch.cat([x[:, :6], x[:, 9:13]], dim=1), cache=cache)
        cache.crop(-4)
        assert_near(model(x[:, 6:], cache=cache).logits, expected[:, 6:])
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[:, [0, 3, 11]] = 0
        padded = model(x, attention_mask=mask).logits[mask.bool()].view(2, 17, -1)
        assert_near(padded, model(x[mask.bool()].view(2, 17)).logits)
        packed = model(x.view(1, 40), position_ids=torch.arange(20).repeat(2)[None]).logits
        assert_near(packed.view(2, 20, -1), expected)
