"""`ssog` against numpy written from the annex: fields over rows of tokens and over rasters."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.gaussian_field import apply_band, gaussian_band

from ..tiny import assert_near, tiny_config, tiny_model, tokens
from .run import make_mixer, numpy_weights, run

H, W, D, A = 2, 10, 20, 3


def softplus(x):
    return np.logaddexp(0, x)


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def axis_kernel(n, i, mean, width, temperature, window):
    """a[i, ·]: how a token at place i of n looks along one axis."""
    log_density = np.full(n, -np.inf)
    for j in range(n):
        if abs(i - j) <= window:
            log_density[j] = -0.5 * ((i - j - mean) / width) ** 2 - np.log(width * np.sqrt(2 * np.pi))
    return softmax(log_density / temperature, 0)


def field(x, w, grid, window, max_offset, floor, lookat):
    """Token by token, atom by atom, both passes spelled out."""
    rows, columns = grid
    axes = len(w["offsets"])
    v = (x @ w["v_proj.weight"].T).reshape(rows, columns, H, W)
    sizes = softplus(w["raw_widths"]) + 1e-4 + floor
    temperature = softplus(w["raw_temperature"][0]) + 0.5

    def atom(place, axis, h, r):
        mean, width, logits = w["offsets"][axis, h, r], sizes[axis, h, r], w["weight_logits"][h].copy()
        if lookat:
            gates, token = softplus(w["raw_gates"]), x[place]
            probe = {
                name: np.tanh(w[f"{name}_proj.weight"] @ token + w[f"{name}_proj.bias"]).reshape(-1, H, A)
                for name in ("offset", "width", "weight")
            }
            mean = mean + gates[0] * max_offset * probe["offset"][axis, h, r]
            width = width * np.exp(gates[1] * probe["width"][axis, h, r])
            logits = logits + gates[2] * probe["weight"][0, h]
        return mean, width, softmax(logits, 0)[r]

    out = np.zeros((rows, columns, H, W))
    for h in range(H):
        for r in range(A):
            below = v[:, :, h]
            if axes == 2:
                below = np.zeros((rows, columns, W))
                for i in range(rows):
                    for c in range(columns):
                        mean, width, _ = atom(i * columns + c, 0, h, r)
                        below[i, c] = axis_kernel(rows, i, mean, width, temperature, window) @ v[:, c, h]
            for i in range(rows):
                for c in range(columns):
                    mean, width, weight = atom(i * columns + c, axes - 1, h, r)
                    out[i, c, h] += weight * axis_kernel(columns, c, mean, width, temperature, window) @ below[i]
    return out.reshape(rows * columns, H * W) @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    ("params", "grid"),
    [({}, (1, 31)), ({"lookat": False, "sigma_floor": 0.0}, (1, 31)), ({"grid": [5, 4]}, (5, 4)),
     ({"grid": [3, 7], "lookat": False}, (3, 7)), ({"max_offset": 0.0, "max_sigma": 0.1}, (1, 150))],
)  # fmt: skip
def test_ssog_follows_the_annex(params, grid):
    params = {"num_atoms": A, "max_offset": 1.5, "max_sigma": 0.4, "cold_init": False} | params
    mixer = make_mixer("ssog", params)
    for name in ("offsets", "raw_widths", "weight_logits", "raw_temperature", "raw_gates"):
        if hasattr(mixer, name):
            torch.nn.init.normal_(getattr(mixer, name))
    x = torch.randn(1, grid[0] * grid[1], D, dtype=torch.float64)
    w, p = numpy_weights(mixer), mixer.params
    expected = field(x[0].numpy(), w, grid, p.window, p.max_offset, p.sigma_floor, p.lookat)
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, False, backend)[0], torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_nothing_is_lost_by_ending_the_field():
    """A window that is wide enough for the atoms gives what an unlimited one gives."""
    x, outputs = torch.randn(1, 200, D, dtype=torch.float64), []
    for max_sigma in (2.0, 100.0):
        mixer = make_mixer("ssog", {"max_sigma": max_sigma, "max_offset": 4.0})
        outputs.append(run(mixer, x, False))
    assert_near(outputs[0], outputs[1], rtol=1e-6, atol=1e-8)


def test_the_steering_starts_almost_closed():
    mixer = make_mixer("ssog", {})
    x = torch.randn(1, 20, D, dtype=torch.float64)
    open_probes = run(mixer, x, False)
    for probe in (mixer.offset_proj, mixer.width_proj, mixer.weight_proj):
        torch.nn.init.zeros_(probe.weight)
        torch.nn.init.zeros_(probe.bias)
    assert_near(open_probes, run(mixer, x, False), rtol=2e-2, atol=2e-2)
    torch.manual_seed(0)
    model = tiny_model("ssog", is_causal=False)
    assert not any(p.any() for key, p in model.named_parameters() if "offset_proj" in key)


def test_atoms_beyond_the_border_or_narrower_than_a_token_stay_finite():
    mean = torch.tensor([-1e4, 1e4, 0.3, 0.5])[:, None].expand(-1, 20)
    width = torch.tensor([1e-4, 1e3, 1e-4, 1e5])[:, None].expand(-1, 20)
    mean, width = mean.clone().requires_grad_(), width.clone().requires_grad_()
    weights = gaussian_band(mean, width, 3, torch.tensor([20, 13, 1, 20]))
    apply_band(weights, torch.randn(4, 20, 5)).sum().backward()
    assert_near(weights.sum(-1), torch.ones(4, 20))
    assert weights.isfinite().all() and mean.grad.isfinite().all() and width.grad.isfinite().all()


@pytest.mark.parametrize(("T", "radius"), [(1, 0), (5, 4), (64, 3), (130, 28), (200, 70)])
def test_a_band_applied_is_a_sum_over_neighbours(T, radius):
    weights, values = torch.randn(2, T, 2 * radius + 1).double(), torch.randn(2, T, 3).double()
    expected = torch.zeros_like(values)
    for i in range(T):
        for j in range(max(0, i - radius), min(T, i + radius + 1)):
            expected[:, i] += weights[:, i, radius + j - i, None] * values[:, j]
    assert_near(apply_band(weights, values), expected, rtol=1e-10, atol=1e-10)


def test_a_raster_needs_whole_rasters_and_valid_numbers():
    model = tiny_model("ssog", is_causal=False, mixer_params={"ssog": {"grid": [3, 4]}})
    mask = torch.tensor([[0, 0] + [1] * 12])
    x = tokens(1, 14)
    assert_near(model(x, attention_mask=mask).logits[:, 2:], model(x[:, 2:]).logits)
    with pytest.raises(ValueError, match="3×4 = 12 tokens"):
        model(tokens(1, 13))
    for grid in ([3], "square", [3, 0]):
        with pytest.raises(ValueError, match="grid"):
            tiny_config("ssog", mixer_params={"ssog": {"grid": grid}})


def test_the_patch_grid_of_an_image_config_is_found():
    class Image:
        image_size, patch_size = (32, 48), 16

    params = make_mixer("ssog", {}).params
    assert params.resolve(Image, frozenset()).grid == (2, 3)
