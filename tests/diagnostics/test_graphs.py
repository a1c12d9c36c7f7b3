"""Spectra of the graphs of consensus, and energies of streams."""

import logging

import numpy as np
import pytest
import torch

from frankenstein_hf import diagnostics
from frankenstein_hf.diagnostics import (
    cycle_connectivity,
    dirichlet_energy,
    graph_spectrum,
    path_connectivity,
    rough_energy,
)

from ..mixers.run import plain_context, run
from ..tiny import tiny_model, tokens

MASK = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 0, 1, 1, 1]])


def laplacian(layer, y, is_causal):
    """[heads, N·W, N·W] from the edges' matrices, block by block; `y` [N, D] are real tokens of one document."""
    rows = plain_context(layer, y[None], is_causal).rows[0]
    i, j, alpha, beta, Lambda, _ = layer.edges(y[None], None, rows)
    N, H, W = len(y), layer.num_heads, layer.head_dim
    L = torch.zeros(H, N, W, N, W, dtype=torch.float64)
    for n, (a, b) in enumerate(zip(i.tolist(), j.tolist())):
        for h in range(H):
            unit = torch.nn.functional.normalize(Lambda[0, n, h], dim=-1)
            R = alpha[0, n, 0] * torch.eye(W) + beta[0, n, 0] * unit.T @ unit
            L[h, a, :, a] += R
            L[h, a, :, b] -= R
            if not is_causal:
                L[h, b, :, b] += R
                L[h, b, :, a] -= R
    return L.reshape(H, N * W, N * W)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_spectrum_is_that_of_the_laplacian_written_out_whatever_is_padded(is_causal):
    params = {"self_consensus": {"rope": "none", "edge_hidden_size": 8, "rank": 3}}
    model = tiny_model(["self_consensus"], is_causal, mixer_params=params).double()
    x, layer = tokens(2, 9), model.model.layers[0].mixer
    (found,) = graph_spectrum(model, {"input_ids": x, "attention_mask": MASK})
    with torch.no_grad():
        layers = [
            laplacian(layer, layer.normed(model.get_input_embeddings()(row[keep.bool()])), is_causal)
            for row, keep in zip(x, MASK)
        ]
    values = [torch.linalg.eigvals(L).real.sort().values for L in layers]
    assert abs(found.largest - max(v.max() for v in values)) < 1e-6 * found.largest
    if is_causal:
        assert found.smallest is None
    else:
        assert abs(found.smallest - min(v[:, layer.head_dim].min() for v in values)) < 1e-6
    assert abs(found.step - 0.105) < 1e-3
    assert found.path == path_connectivity(9, 2) and found.cycle == cycle_connectivity(9, 2)


def test_long_sequences_are_measured_by_power_iteration(monkeypatch):
    model = tiny_model(["self_consensus"] * 2, False)
    batch = {"input_ids": tokens(2, 20)}
    whole = graph_spectrum(model, batch)
    monkeypatch.setattr(diagnostics.graphs, "LARGEST", 1)
    for one, other in zip(graph_spectrum(model, batch), whole):
        assert abs(one.largest - other.largest) < 5e-3 * other.largest
        assert one.smallest is None and other.smallest > 0


def test_an_unstable_step_is_warned_of(caplog):
    model = tiny_model(["standard", "self_consensus"], False)
    batch = {"input_ids": tokens(1, 9)}
    mixer = model.model.layers[1].mixer
    with torch.no_grad():
        mixer.raw_step.fill_(-9.0)
        with caplog.at_level(logging.WARNING):
            assert graph_spectrum(model, batch)[0].is_stable
        assert "rougher" not in caplog.text
        mixer.raw_step.fill_(9.0)
        with caplog.at_level(logging.WARNING):
            (found,) = graph_spectrum(model, batch)
    assert found.gain >= 2 and not found.is_stable and found.layer == 1
    assert "Layer 1: η λ_max" in caplog.text
    with pytest.raises(ValueError, match="has none"):
        graph_spectrum(tiny_model("swa"), batch)


def test_connectivity_of_paths_and_cycles():
    for N, w in ((9, 2), (20, 4), (41, 1)):
        cycle = 2 * sum(1 - np.cos(2 * np.pi * k / N) for k in range(1, w + 1))
        assert abs(cycle_connectivity(N, w) - cycle) < 1e-9
        path, double = path_connectivity(N, w), cycle_connectivity(2 * N, w)
        assert double / 2 - 1e-9 <= path <= min(double, cycle) + 1e-9
    assert abs(path_connectivity(5, 4) - 5) < 1e-9  # the complete graph
    for call, words in ((lambda: cycle_connectivity(4, 2), "2w"), (lambda: path_connectivity(1, 1), "N ≥ 2")):
        with pytest.raises(ValueError, match=words):
            call()


def test_energy_of_constants_of_noise_and_of_what_is_not_counted():
    assert rough_energy(torch.ones(1, 30, 4)) == 0
    noise = torch.randn(4, 500, 8, generator=torch.Generator().manual_seed(1))
    assert abs(rough_energy(noise) - 2) < 0.1
    assert abs(rough_energy(noise, window=5) - 2) < 0.1
    alternating = torch.ones(1, 30, 4)
    alternating[:, ::2] = -1
    assert rough_energy(alternating) == 4 and rough_energy(alternating, window=2) < 4
    spoilt = torch.ones(1, 30, 4)
    spoilt[:, 7] = 50
    keep = torch.ones(1, 30)
    keep[:, 7] = 0
    assert rough_energy(spoilt, keep) == 0
    assert rough_energy(torch.ones(1, 1, 4)) == 0


def test_layers_of_consensus_smooth_what_they_add():
    params = {"self_consensus": {"rope": "none", "edge_hidden_size": 8}}
    model, x = tiny_model(["self_consensus"] * 2, False, mixer_params=params), tokens(2, 9)
    batch = {"input_ids": x, "attention_mask": MASK}
    streams = dirichlet_energy(model, batch)
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(streams) == 2 and streams[0][1] == streams[1][0]
    assert abs(streams[0][0] - rough_energy(states[0].detach(), MASK)) < 1e-6
    assert abs(streams[0][1] - rough_energy(states[1].detach(), MASK)) < 1e-6
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        u = mixer.u_proj(states[0])
        mixer.o_proj.weight.copy_(torch.eye(20))
        mixer.o_proj.bias.zero_()
        mixed = run(mixer, states[0][:1], False)
    assert rough_energy(mixed) < rough_energy(u[:1])
    with pytest.raises(ValueError, match="no list of layers"):
        dirichlet_energy(torch.nn.Linear(2, 2), {})
