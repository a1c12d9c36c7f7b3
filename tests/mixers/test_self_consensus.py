"""`self_consensus` against numpy written from the formulas, and the theory of consensus: energy, spectra, graphs."""

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops import consensus as ops
from frankenstein_hf.modeling.ops.consensus import (
    EdgeNetworks,
    Edges,
    Window,
    aligned_edges,
    consensus_energy,
    consensus_gradient,
    edge_weights,
    weighted,
    window_consensus_gradient,
    window_edges,
)

from ..tiny import assert_near, tiny_config, tiny_model
from .run import make_mixer, numpy_weights, plain_context, run

H, W, D = 2, 10, 20
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


# ---------------------------------------------------------------------- numpy, edge by edge


def softplus(x):
    return np.logaddexp(0, x)


def gelu(x):
    erf = torch.erf(torch.from_numpy(x) / 2**0.5).numpy()
    return 0.5 * x * (1 + erf)


def rotation(distance, width):
    """Q_m as a matrix, pairs (k, k + width/2)."""
    half, Q = width // 2, np.eye(width)
    for k in range(half):
        angle = distance * 10000.0 ** (-2 * k / width)
        Q[k, k] = Q[k + half, k + half] = np.cos(angle)
        Q[k, k + half], Q[k + half, k] = -np.sin(angle), np.sin(angle)
    return Q


def edge_matrices(w, e, params):
    """R [H, W, W] of an edge with the features e = [y_i; y_j]."""
    D, hidden = len(e) // 2, params.edge_hidden_size
    A = np.concatenate([w["edge_source_proj.weight"], w["edge_target_proj.weight"]], axis=1)
    z = gelu(A @ e + w["edge_source_proj.bias"])
    za, zb, zL = (z, z, z) if params.shared_trunk else (z[:hidden], z[hidden : 2 * hidden], z[2 * hidden :])
    alpha = softplus(w["alpha_proj.weight"] @ za + w["alpha_bias"])
    beta = softplus(w["beta_proj.weight"] @ zb + w["beta_bias"])
    Lambda = (w["lambda_proj.weight"] @ zL + w["lambda_bias"]).reshape(H, params.rank, D // H)
    Lambda = Lambda / np.linalg.norm(Lambda, axis=-1, keepdims=True)
    return [alpha[h % len(alpha)] * np.eye(D // H) + beta[h % len(beta)] * Lambda[h].T @ Lambda[h] for h in range(H)]


def consensus(y, w, params, is_causal):
    N, width = len(y), y.shape[1] // H
    u = (y @ w["u_proj.weight"].T + w["u_proj.bias"]).reshape(N, H, width)
    R = {
        (i, j): edge_matrices(w, np.concatenate([y[i], y[j]]), params)
        for i in range(N)
        for j in range(N)
        if 0 < abs(i - j) <= params.window_size
    }
    Q = {m: np.eye(width) if params.rope == "none" else rotation(m, width) for m in range(-N, N + 1)}
    front = {m: Q[m].T if params.rope == "gradient" else np.eye(width) for m in Q}
    for t in range(params.num_iterations):
        moved = u.copy()
        for i in range(N):
            step = softplus(w["raw_step"][t, i if params.step == "per_position" else 0])
            for h in range(H):
                change = np.zeros(width)
                for j in range(N):
                    if (i, j) not in R or (is_causal and j > i):
                        continue
                    change += front[i - j] @ R[i, j][h] @ (Q[i - j] @ u[i, h] - u[j, h])
                    if not is_causal:
                        change += R[j, i][h] @ (u[i, h] - Q[j - i] @ u[j, h])
                moved[i, h] -= step * change
        u = moved
    return u.reshape(N, -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"rope": "odyssey", "window_size": 3, "per_head": True},
        {"rope": "none", "num_iterations": 3, "window_size": 1, "step": "per_position"},
        {"shared_trunk": True, "num_iterations": 2, "rank": 1},
    ],
)
def test_self_consensus_follows_the_formulas(params, is_causal):
    mixer = make_mixer("self_consensus", {"rank": 3, "edge_hidden_size": 7} | params)
    assert torch.nn.functional.softplus(mixer.raw_step).allclose(torch.tensor(0.105, dtype=torch.float64), atol=1e-3)
    torch.nn.init.normal_(mixer.raw_step)
    y = torch.randn(1, 11, D, dtype=torch.float64)
    expected = consensus(y[0].numpy(), numpy_weights(mixer), mixer.params, is_causal)
    # rotary angles are fp32 throughout the library
    tolerance = TIGHT if mixer.params.rope == "none" else {"rtol": 1e-5, "atol": 1e-5}
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, y, is_causal, backend)[0], torch.from_numpy(expected), **tolerance)


# ---------------------------------------------------------------------- pieces for the theory


class Graph:
    """Random nodes and networks in fp64, and the edges of a window."""

    def __init__(self, N=9, w=2, r=3, R=2, is_causal=False, scale=0.5, h=1):
        generator = torch.Generator().manual_seed(4)

        def randn(*shape):
            return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)

        hidden, self.N, self.w, self.r = 5, N, w, r
        self.networks = EdgeNetworks(
            randn(hidden, h), randn(hidden, h), randn(hidden, H * r * W), randn(h), randn(h), randn(H * r * W)
        )
        self.source, self.target = randn(R, N, 3 * hidden), randn(R, N, 3 * hidden)
        self.u = 2 * randn(R, N, H, W)
        self.i, self.j = window_edges(N, w, is_causal)
        self.weights = self.of(self.i, self.j)
        self.edges = Edges(self.i, self.j, *self.weights)

    def of(self, i, j, target=None):
        target = self.target if target is None else target
        return edge_weights(self.source[:, i] + target[:, j], self.networks, (H, W))

    def matrices(self):
        """R [R, E, H, W, W], written out."""
        alpha, beta, Lambda = self.weights
        unit = torch.nn.functional.normalize(Lambda, dim=-1)
        eye = torch.eye(W, dtype=torch.float64)
        return alpha[..., None, None] * eye + beta[..., None, None] * unit.mT @ unit

    def laplacian(self, **how):
        """L [R, N·H·W, N·H·W]: column by column what the gradient makes of unit vectors."""
        size = self.N * H * W
        columns = []
        for k in range(size):
            unit = torch.zeros(size, dtype=torch.float64)
            unit[k] = 1
            u = unit.view(1, self.N, H, W).expand_as(self.u)
            columns.append(consensus_gradient(u, self.edges, **how).flatten(1))
        return torch.stack(columns, dim=-1)


def angles(distance):
    frequencies = 10000.0 ** (-torch.arange(0, W, 2, dtype=torch.float64) / W)
    both = distance[:, None] * torch.cat([frequencies, frequencies])
    return both.cos(), both.sin()


# 1 -------------------------------------------------------------------------------------------------------------------


def test_edge_matrices_are_positive_definite_and_bounded_and_never_needed():
    graph = Graph()
    alpha, beta, _ = graph.weights
    matrices = graph.matrices()
    values = torch.linalg.eigvalsh(matrices)
    assert_near(matrices, matrices.mT, rtol=0, atol=1e-15)
    assert (alpha > 0).all() and (beta > 0).all()
    assert (values >= alpha[..., None] - 1e-9).all()
    assert (values <= (alpha + graph.r * beta)[..., None] + 1e-9).all()
    # all but r of them are alpha
    assert_near(values[..., : W - graph.r], alpha[..., None].expand_as(values)[..., : W - graph.r], **TIGHT)
    q = torch.randn(2, len(graph.i), H, W, dtype=torch.float64)
    assert_near(weighted(q, *graph.weights), (matrices @ q[..., None]).squeeze(-1), rtol=1e-8, atol=1e-8)


# 2 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [False, True])
def test_the_update_is_the_gradient_of_the_energy(rotated):
    graph = Graph()
    how = {"rotation": angles if rotated else None}
    u = graph.u.clone().requires_grad_()
    # the energy from matrices written out
    q = u[:, graph.i]
    if rotated:
        Q = torch.stack([torch.from_numpy(rotation(m, W)) for m in (graph.i - graph.j).tolist()])
        q = (Q[:, None] @ q[..., None]).squeeze(-1)
    q = (q - u[:, graph.j])[..., None]
    energy = 0.5 * (q.mT @ graph.matrices() @ q).sum((1, 2, 3, 4))
    assert_near(consensus_energy(u, graph.edges, **how), energy, rtol=1e-8, atol=1e-8)
    (expected,) = torch.autograd.grad(energy.sum(), u)
    assert_near(consensus_gradient(graph.u, graph.edges, **how), expected, rtol=1e-8, atol=1e-8)


def test_the_released_rotary_update_is_not_that_gradient():
    graph = Graph()
    exact = consensus_gradient(graph.u, graph.edges, rotation=angles)
    released = consensus_gradient(graph.u, graph.edges, rotation=angles, rotate_back=False)
    assert ((exact - released).norm() / exact.norm()) > 0.05


# 3 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_constants_are_kept_exactly_without_positions(is_causal):
    graph = Graph(is_causal=is_causal)
    u = torch.randn(2, 1, H, W, dtype=torch.float64).expand_as(graph.u)
    window = Window(graph.w, is_causal)
    change = window_consensus_gradient(u, graph.source, graph.target, graph.networks, window)
    assert not change.any()


def test_rotary_states_of_no_energy_turn_with_the_position():
    graph = Graph()
    cos_sin = angles(-torch.arange(graph.N))  # Q_i u_i is constant
    u = ops.apply_rotary(graph.u[:, :1].expand_as(graph.u), *cos_sin)
    assert consensus_energy(u, graph.edges, rotation=angles).abs().max() < 1e-12
    assert consensus_gradient(u, graph.edges, rotation=angles).abs().max() < 1e-7


# 4 and 6 (spectra) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [False, True])
def test_a_stable_step_lowers_the_energy_and_one_beyond_the_bound_need_not(rotated):
    graph = Graph(R=1)
    how = {"rotation": angles if rotated else None}
    L = graph.laplacian(**how)[0]
    assert_near(L, L.mT, rtol=1e-8, atol=1e-8)
    values, vectors = torch.linalg.eigh(L)
    assert values[0] > -1e-9
    largest, steepest = values[-1], vectors[:, -1].view_as(graph.u)
    for step in (0.1, 1.0, 1.999):
        u = graph.u - step / largest * consensus_gradient(graph.u, graph.edges, **how)
        assert consensus_energy(u, graph.edges, **how) < consensus_energy(graph.u, graph.edges, **how)
    u = steepest - 2.01 / largest * consensus_gradient(steepest, graph.edges, **how)
    assert consensus_energy(u, graph.edges, **how) > consensus_energy(steepest, graph.edges, **how)


def test_the_low_pass_keeps_constants_and_lies_between_the_bounds_of_the_weights():
    graph = Graph(R=1, N=8)
    L, values = graph.laplacian()[0], torch.linalg.eigvalsh(graph.laplacian()[0])
    width = H * W
    assert values[:width].abs().max() < 1e-9 < values[width]  # constants times R^d, and nothing else
    pairs = {(i, j): n for n, (i, j) in enumerate(zip(graph.i.tolist(), graph.j.tolist()))}
    R = graph.matrices()[0]
    both = torch.stack([R[n] + R[pairs[j, i]] for (i, j), n in pairs.items()])
    spectrum = torch.linalg.eigvalsh(both)
    plain = path_laplacian(8, graph.w)
    assert spectrum.min() * plain[1] <= values[width] + 1e-9
    assert values[width] <= spectrum.max() * plain[1] + 1e-9
    # λ_max(L) ≤ 2 max ‖D_i‖
    degrees = [sum(both[n] for (i, _), n in pairs.items() if i == node) for node in range(8)]
    assert values[-1] <= 2 * max(torch.linalg.eigvalsh(D).max() for D in degrees) + 1e-9
    # L_sym = D^-1/2 L D^-1/2 lives in [0, 2]
    D = torch.block_diag(*(torch.block_diag(*node) for node in degrees))
    d, V = torch.linalg.eigh(D)
    root = V @ torch.diag(d**-0.5) @ V.T
    normalised = torch.linalg.eigvalsh(root @ L @ root)
    assert normalised.min() > -1e-9 and normalised.max() < 2 + 1e-9
    assert (normalised.abs() < 1e-9).sum() == width


# 5 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rotate_back", [None, True, False])
@pytest.mark.parametrize(("N", "w"), [(1, 2), (3, 5), (23, 2)])
def test_shifts_give_what_the_list_of_edges_gives_with_gradients(N, w, is_causal, rotate_back, monkeypatch):
    monkeypatch.setitem(ops.SEGMENT_FLOATS, "cpu", 1)  # segments of w nodes
    graph = Graph(N=N, w=w, is_causal=is_causal, h=H)
    keep = torch.arange(N) < torch.tensor([[N], [max(1, N - 4)]])
    how = {"rotation": None if rotate_back is None else angles}
    back = True if rotate_back is None else rotate_back
    leaves = [x.requires_grad_() for x in (graph.u, graph.source, graph.target, *graph.networks)]
    edges = Edges(graph.i, graph.j, *graph.of(graph.i, graph.j), keep[:, graph.i] & keep[:, graph.j])
    expected = consensus_gradient(graph.u, edges, rotate_back=back, source_only=is_causal, **how)
    window = Window(w, is_causal, back)
    actual = window_consensus_gradient(graph.u, graph.source, graph.target, graph.networks, window, keep=keep, **how)
    assert_near(actual, expected, **TIGHT)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True) for x in (actual, expected))):
        assert_near(a, torch.zeros_like(a) if b is None else b, rtol=1e-8, atol=1e-8)


def test_a_second_derivative_of_the_fast_form_is_refused():
    graph = Graph()
    u = graph.u.requires_grad_()
    window = Window(2, False)
    out = window_consensus_gradient(u, graph.source.requires_grad_(), graph.target, graph.networks, window)
    (first,) = torch.autograd.grad(out.square().sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_is_kept_for_the_backward_pass_holds_no_weight_of_an_edge():
    """Λ of all edges would be N·2w·r·H·W numbers: more than all that is kept, by far."""
    kept = []

    def count(x):
        kept.append(x.numel())
        return x

    graph = Graph(N=400, w=3, r=4, R=1)
    networks = EdgeNetworks(*(x.requires_grad_() for x in graph.networks))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = window_consensus_gradient(graph.u, graph.source, graph.target, networks, Window(3, False))
    assert sum(kept) < 400 * (H * W + 2 * 15 + 1) + 3000 < 400 * 6 * 4 * H * W / 8
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in networks)


def test_edges_of_other_graphs_and_nodes_that_do_not_exist():
    graph = Graph(N=6)
    i, j = torch.tensor([0, 5, 0, 3]), torch.tensor([5, 0, 3, 0])  # far apart
    edges = Edges(i, j, *graph.of(i, j))
    change = consensus_gradient(graph.u, edges)
    assert not change[:, [1, 2, 4]].any() and change[:, [0, 3, 5]].all()
    assert_near(change.sum(1), torch.zeros(2, H, W, dtype=torch.float64), **TIGHT)  # what one gives, another gets
    with pytest.raises(ValueError, match="nodes 0 … 4"):
        consensus_gradient(graph.u[:, :5], edges)
    with pytest.raises(ValueError, match="4 edges"):
        consensus_gradient(graph.u, edges._replace(Lambda=edges.Lambda[:, :2]))


def test_the_window_graph_has_the_edges_of_the_definition():
    for N, w in ((1, 2), (5, 2), (12, 3), (4, 9)):
        pairs = set(zip(*(x.tolist() for x in window_edges(N, w))))
        assert pairs == {(i, j) for i in range(N) for j in range(N) if 0 < abs(i - j) <= w}
        if w < N:
            assert len(pairs) == 2 * w * N - w * (w + 1)
        causal = set(zip(*(x.tolist() for x in window_edges(N, w, is_causal=True))))
        assert causal == {(i, j) for i, j in pairs if j < i}


# 6 and 7 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("w", "iterations"), [(2, 1), (3, 1), (2, 2)])
def test_a_layer_sees_exactly_its_window(w, iterations, is_causal):
    mixer = make_mixer("self_consensus", {"window_size": w, "num_iterations": iterations, "edge_hidden_size": 6})
    y = torch.randn(1, 15, D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda y: run(mixer, y, is_causal).sum(-1)[0], y)[:, 0]
    seen = jacobian.abs().amax(-1) > 1e-12
    i = torch.arange(15)
    distance = i[:, None] - i
    reach = w * iterations
    expected = (distance >= 0) & (distance <= reach) if is_causal else distance.abs() <= reach
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_the_number_of_parameters_is_the_formula_and_does_not_know_the_window(shared_trunk):
    counts = set()
    for w in (1, 2, 7):
        params = {"window_size": w, "rank": 3, "edge_hidden_size": 11, "shared_trunk": shared_trunk}
        mixer = make_mixer("self_consensus", params)
        counts.add(sum(p.numel() for key, p in mixer.named_parameters() if key.endswith("weight")))
    ξ, r = 11, 3
    assert counts == {2 * D**2 + (2 if shared_trunk else 6) * D * ξ + r * D * ξ + 2 * ξ}


# 9 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_rotary_positions_are_relative(is_causal):
    """The tokens a document has before it change nothing: positions enter as differences only."""
    mixer = make_mixer("self_consensus", {"rope": "gradient"})
    y = torch.randn(1, 9, D, dtype=torch.float64)
    context = plain_context(mixer, y, is_causal)
    expected = mixer(y, context)[0]
    moved = plain_context(mixer, y, is_causal)
    moved.num_past = torch.tensor([100])
    assert moved.rows[0].positions[0, 0] == 100
    assert torch.equal(mixer(y, moved)[0], expected)
    still = make_mixer("self_consensus", {"rope": "none"})
    still.load_state_dict(mixer.state_dict())
    assert not torch.allclose(run(still, y, is_causal), expected)


def test_a_rotation_keeps_lengths_whatever_the_rotary_scaling_says():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    mixer = make_mixer("self_consensus", {"rope": "gradient"}, rope_parameters=yarn)
    rows = plain_context(mixer, torch.zeros(1, 3, D)).rows[0]
    cos, sin = mixer.rotation(rows)(torch.arange(4))
    assert_near(cos.square() + sin.square(), torch.ones_like(cos))
    assert mixer.rotation(rows)(torch.tensor([0]))[0].eq(1).all()


# 10 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [False, True])
def test_cross_consensus_moves_the_source_only_and_counts_every_edge_once(rotated):
    graph, J = Graph(N=6, R=1), 4
    v = torch.randn(1, J, H, W, dtype=torch.float64)
    context_side = torch.randn(1, J, 15, dtype=torch.float64)
    i, j = aligned_edges(6, J, 1)
    assert set(zip(i.tolist(), j.tolist())) == {(a, b) for a in range(6) for b in range(J) if abs(a - b) <= 1}
    without = aligned_edges(6, J, 1, include_own=False)
    assert set(zip(*(x.tolist() for x in without))) == {(a, b) for a in range(6) for b in range(J) if abs(a - b) == 1}
    graph.weights = graph.of(i, j, context_side)
    edges, R = Edges(i, j, *graph.weights), graph.matrices()
    how = {"rotation": angles if rotated else None}
    before = v.clone()
    change = consensus_gradient(graph.u, edges, v, **how)
    assert torch.equal(v, before)
    expected = torch.zeros_like(graph.u)
    for n, (a, b) in enumerate(zip(i.tolist(), j.tolist())):
        Q = torch.from_numpy(rotation(a - b, W)) if rotated else torch.eye(W, dtype=torch.float64)
        for h in range(H):
            expected[0, a, h] += Q.T @ R[0, n, h] @ (Q @ graph.u[0, a, h] - v[0, b, h])
    assert_near(change, expected, rtol=1e-8, atol=1e-8)
    assert not change[:, 5].any()  # no context within reach


# 11 ------------------------------------------------------------------------------------------------------------------


def laplacian_of(adjacency):
    return np.linalg.eigvalsh(np.diag(adjacency.sum(1)) - adjacency)


def path_laplacian(N, w):
    distance = abs(np.subtract.outer(np.arange(N), np.arange(N)))
    return laplacian_of(((distance > 0) & (distance <= w)).astype(float))


def cycle_laplacian(N, w):
    distance = abs(np.subtract.outer(np.arange(N), np.arange(N)))
    distance = np.minimum(distance, N - distance)
    return laplacian_of(((distance > 0) & (distance <= w)).astype(float))


@pytest.mark.parametrize("N", [9, 20, 41])
def test_connectivity_of_windows_on_a_cycle_and_on_a_path(N):
    def cycle(N, w):
        return 2 * sum(1 - np.cos(2 * np.pi * k / N) for k in range(1, w + 1))

    for w in (1, 2, 4):
        closed = 2 * w + 1 - np.sin((2 * w + 1) * np.pi / N) / np.sin(np.pi / N)
        assert abs(closed - cycle(N, w)) < 1e-9
        assert abs(cycle_laplacian(N, w)[1] - closed) < 1e-9
        assert closed <= 4 * np.pi**2 / N**2 * w * (w + 1) * (2 * w + 1) / 6
        path, double = path_laplacian(N, w)[1], cycle(2 * N, w)
        assert double / 2 <= path + 1e-9
        assert path <= min(double, closed) + 1e-9


def test_the_first_step_smooths_strongly_and_stays_stable():
    largest = path_laplacian(200, 2)[-1]
    assert abs(largest - 6.25) < 0.01
    assert abs(softplus(-2.2) * 2 * np.log(2) * largest - 0.91) < 0.01


# ---------------------------------------------------------------------- parameters


def test_wrong_parameters_are_refused():
    for params, words in (({"rope": "rope"}, "gradient"), ({"window_size": 0}, "window_size"), ({"rank": 0}, "rank")):
        with pytest.raises(ValueError, match=words):
            tiny_config("self_consensus", mixer_params={"self_consensus": params})


def test_positions_beyond_the_last_share_its_step():
    params = {"self_consensus": {"step": "per_position"}}
    model = tiny_model("self_consensus", max_position_embeddings=8, mixer_params=params)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.raw_step.copy_(torch.arange(8.0)[None])
    rows = plain_context(mixer, torch.zeros(1, 12, D)).rows[0]
    expected = torch.nn.functional.softplus(torch.tensor([*range(8), 7, 7, 7, 7]).float())
    assert_near(mixer.steps(rows, 0)[0, 0], expected)
