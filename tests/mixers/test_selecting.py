"""`nsa`, `lsa`, `sparge` and `fasa` against loops over queries in numpy: the selected sets first, then the numbers."""

import math

import numpy as np
import pytest
import torch

from frankenstein_hf.modeling.ops.clustering import ward_buckets

from ..tiny import assert_near, tiny_config
from .run import make_mixer, numpy_weights, run
from .test_dense import H, T, W, attention, check, i, j, rotate


def softmax(s):
    p = np.exp(s - s.max())
    return p / p.sum()


def projections(x, w, groups=1, rotated=True):
    turn = rotate if rotated else (lambda y: y)
    q = [turn((x @ w["q_proj.weight"].T)[:, h * W : (h + 1) * W]) for h in range(H)]
    k = [turn((x @ w["k_proj.weight"].T)[:, g * W : (g + 1) * W]) for g in range(groups)]
    v = [(x @ w["v_proj.weight"].T)[:, g * W : (g + 1) * W] for g in range(groups)]
    return q, k, v


def recorded(mixer):
    """What `select` returned, in a list to come."""
    seen, select = [], mixer.select
    mixer.select = lambda *args: seen.append(select(*args)) or seen[-1]
    return seen


def compare(mixer, expected, is_causal, name_sets):
    """`expected(x, w)` returns the output and the selected sets in the form of `name_sets(recorded)`."""
    x = torch.randn(1, T, 20, dtype=torch.float64)
    out, sets = expected(x[0].numpy(), numpy_weights(mixer))
    for backend in ("eager", "sdpa"):
        seen = recorded(mixer)
        actual = run(mixer, x, is_causal, backend)[0]
        del mixer.select
        assert name_sets(seen) == sets, backend
        assert_near(actual, torch.from_numpy(out), rtol=1e-5, atol=1e-6)


# nsa -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_nsa_three_branches(is_causal, groups):
    l, d, C, n, w_size = 4, 2, 2, 4, 3
    params = {"block_size": l, "stride": d, "select_block": C, "num_selected": n, "window_size": w_size}
    mixer = make_mixer("nsa", params, num_key_value_heads=groups)
    torch.nn.init.normal_(mixer.k_compression.place)

    def compress(block, w, name):
        y = (block + w[f"{name}_compression.place"]).reshape(-1)
        y = w[f"{name}_compression.up_proj.weight"] @ y + w[f"{name}_compression.up_proj.bias"]
        y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        return w[f"{name}_compression.down_proj.weight"] @ y

    def expected(x, w):
        q, k, v = projections(x, w, groups)
        gate = 1 / (1 + np.exp(-(x @ w["g_proj.weight"].T + w["g_proj.bias"])))
        out, sets = np.zeros((T, H * W)), [[None] * groups for _ in range(T)]
        N = -(-T // C)
        for g in range(groups):
            starts = range(0, T - l + 1, d)
            k_c = [compress(k[g][s : s + l], w, "k") for s in starts]
            v_c = [compress(v[g][s : s + l], w, "v") for s in starts]
            heads = range(g * H // groups, (g + 1) * H // groups)
            for t in range(T):
                complete = [c for c, s in enumerate(starts) if s + l - 1 <= t or not is_causal]
                importance, far = np.zeros(N), {}
                for h in heads:
                    far[h] = np.zeros(W)
                    if complete:
                        p = softmax(np.array([q[h][t] @ k_c[c] for c in complete]) / np.sqrt(W))
                        far[h] = sum(weight * v_c[c] for weight, c in zip(p, complete))
                        for weight, c in zip(p, complete):
                            for b in range(N):  # strides both cover
                                own = {s // d for s in range(starts[c], starts[c] + l)}
                                importance[b] += weight * len(own & {s // d for s in range(b * C, b * C + C)})
                own = t // C
                forced = {0, own, max(0, own - 1)} | (set() if is_causal else {min(N - 1, own + 1)})
                others = [b for b in range(own if is_causal else N) if b not in forced]
                best = sorted(others, key=lambda b: (-importance[b], b))[: n - (3 if is_causal else 4)]
                sets[t][g] = sorted(forced | set(best))
                inside = [s for b in sets[t][g] for s in range(b * C, min(T, b * C + C)) if s <= t or not is_causal]
                near = [s for s in range(T) if (t - w_size < s <= t if is_causal else abs(s - t) <= w_size // 2)]
                for h in heads:
                    parts = [far[h]] + [softmax(k[g][s] @ q[h][t] / np.sqrt(W)) @ v[g][s] for s in (inside, near)]
                    out[t, h * W : (h + 1) * W] = sum(gate[t, 3 * h + b] * part for b, part in enumerate(parts))
        return out @ w["o_proj.weight"].T, sets

    def name_sets(seen):
        return [[row.nonzero().flatten().tolist() for row in token] for token in seen[0][0].transpose(0, 1)]

    compare(mixer, expected, is_causal, name_sets)


# lsa -----------------------------------------------------------------------------------------------------------------


def ward(keys, pool, wanted, most):
    """Merge one pair at a time within rounds, from the definition; buckets as lists of keys, by first key."""
    C = len(keys)
    buckets = [list(range(s, min(s + pool, C))) for s in range(0, C, pool)]

    def cost(a, b):
        s, t = keys[a].sum(0), keys[b].sum(0)
        return np.linalg.norm(s) + np.linalg.norm(t) - np.linalg.norm(s + t)

    while len(buckets) > wanted:
        allowed = {}
        for x in range(len(buckets)):
            for y in range(len(buckets)):
                if x != y and len(buckets[x]) + len(buckets[y]) <= most:
                    allowed[x, y] = cost(buckets[x], buckets[y])
        nearest = {}
        for x in range(len(buckets)):
            options = [(c, y) for (a, y), c in allowed.items() if a == x]
            if options:
                nearest[x] = min(options)[1]
        pairs = [(allowed[x, y], x, y) for x, y in nearest.items() if x < y and nearest[y] == x]
        if not pairs:
            break
        for _, x, y in sorted(pairs)[: len(buckets) - wanted]:
            buckets[x], buckets[y] = sorted(buckets[x] + buckets[y]), []
        buckets = sorted((b for b in buckets if b), key=lambda b: b[0])
    return buckets


@pytest.mark.parametrize("shape", [(16, 2, 4, 8), (12, 1, 3, 8), (9, 2, 3, 5), (5, 4, 1, 99)])
def test_ward_merges_mutually_cheapest_pairs(shape):
    C, pool, wanted, most = shape
    keys = torch.nn.functional.normalize(torch.randn(6, C, 5, dtype=torch.float64), dim=-1)
    bucket, centroids = ward_buckets(keys, pool, wanted, most)
    for block, numbers, centres in zip(keys.numpy(), bucket.tolist(), centroids):
        expected = ward(block, pool, wanted, most)
        assert [[x for x, n in enumerate(numbers) if n == b] for b in range(len(expected))] == expected
        for members, centre in zip(expected, centres):
            total = block[members].sum(0)
            np.testing.assert_allclose(centre.numpy(), total / np.linalg.norm(total), atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_lsa_finds_keys_through_clusters(is_causal, groups):
    C, m, k_long, sinks = 4, 2, 3, 1
    params = {
        "num_long_range": k_long, "num_buckets": 3, "num_sinks": sinks, "pool_size": 1, "cluster_block": C,
        "keys_per_bucket": 2, "max_keys_per_bucket": 4,
    }  # fmt: skip
    mixer = make_mixer("lsa", params, num_key_value_heads=groups)

    def expected(x, w):
        q, k, v = projections(x, w, groups, rotated=False)
        joined = np.concatenate(k, axis=1)
        unit = joined / np.linalg.norm(joined, axis=1, keepdims=True)
        buckets = []  # (block, keys)
        for block in range(T // C if is_causal else -(-T // C)):
            first, last = block * C, min(T, block * C + C)
            for members in ward(unit[first:last], 1, min(m, -(-(last - first) // 2)), 4):
                buckets.append((block, [first + x for x in members]))
        out, sets = np.zeros((T, H * W)), []
        for t in range(T):
            scores = []
            for number, (block, members) in enumerate(buckets):
                if block < t // C if is_causal else block != t // C:
                    total = unit[members].sum(0)
                    centre = (total / np.linalg.norm(total)).reshape(groups, W)
                    best = max(q[h][t] @ centre[h * groups // H] / np.linalg.norm(q[h][t]) for h in range(H))
                    scores.append((-best, number))
            found = []
            for _, number in sorted(scores)[:3]:
                found += [s for s in buckets[number][1] if s >= sinks][: k_long - len(found)]
            seen = {s for s in range(T) if s < sinks or s // C == t // C} | set(found)
            sets.append(sorted(s for s in seen if s <= t or not is_causal))
            for h in range(H):
                g = h * groups // H
                out[t, h * W : (h + 1) * W] = softmax(k[g][sets[t]] @ q[h][t] / np.sqrt(W)) @ v[g][sets[t]]
        return out @ w["o_proj.weight"].T, sets

    x = torch.randn(1, T, 20, dtype=torch.float64)
    out, sets = expected(x[0].numpy(), numpy_weights(mixer))
    mixer_weights = []
    forward = mixer.core
    mixer.core = lambda *args: mixer_weights.append(forward(*args)) or mixer_weights[-1]
    for backend in ("eager", "sdpa"):
        assert_near(run(mixer, x, is_causal, backend)[0], torch.from_numpy(out), rtol=1e-5, atol=1e-6)
    assert [row.nonzero().flatten().tolist() for row in mixer_weights[0][1][0, 0]] == sets


def test_lsa_parameters_that_cannot_be_met_are_refused():
    for params, message in (
        ({"max_keys_per_bucket": 9}, "at least 2"),
        ({"pool_size": 3}, "must divide"),
        ({"cluster_block": 100}, "must divide"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_config("lsa", mixer_params={"lsa": params})
    assert tiny_config("lsa", mixer_params={"lsa": {"num_buckets": 2}}).params_for(0).num_buckets == 512


# sparge and fasa -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.05, 0.3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_sparge_skips_blocks_predicted_to_matter_little(is_causal, threshold):
    C = 3

    def expected(x, w):
        q, (k,), (v,) = projections(x, w)
        out, sets = np.zeros((T, H * W)), [[None] * H for _ in range(T)]
        for h in range(H):
            for t in range(T):
                end = t + 1 if is_causal else T
                blocks = [list(range(b, min(b + C, end))) for b in range(0, end, C)]
                logits = np.array([k[b].mean(0) @ q[h][t] / np.sqrt(W) + np.log(len(b)) for b in blocks])
                kept = [n for n, p in enumerate(softmax(logits)) if p >= threshold or n == t // C]
                members = [s for n in kept for s in blocks[n]]
                sets[t][h] = kept
                out[t, h * W : (h + 1) * W] = softmax(k[members] @ q[h][t] / np.sqrt(W)) @ v[members]
        return out @ w["o_proj.weight"].T, sets

    def name_sets(seen):
        return [[row.nonzero().flatten().tolist() for row in token] for token in seen[0][0].transpose(0, 1)]

    compare(make_mixer("sparge", {"block_size": C, "threshold": threshold}), expected, is_causal, name_sets)


@pytest.mark.parametrize("importance", ["softmax", "logits"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_fasa_attends_to_what_its_chunks_point_to(is_causal, importance):
    chunks = [[[0, 3], [4, 1]]]
    mixer = make_mixer("fasa", {"num_tip": 2, "num_fac": 4, "chunks": chunks, "importance": importance})

    def expected(x, w):
        q, (k,), (v,) = projections(x, w)
        out, sets = np.zeros((T, H * W)), [[None] * H for _ in range(T)]
        for h in range(H):
            for t in range(T):
                end = t + 1 if is_causal else T
                total = np.zeros(end)
                for c in chunks[0][h]:
                    logits = k[:end][:, [c, c + W // 2]] @ q[h][t][[c, c + W // 2]] / np.sqrt(W)
                    total += softmax(logits) if importance == "softmax" else logits
                best = sorted(np.argsort(-total, kind="stable")[:4].tolist())
                sets[t][h] = best
                out[t, h * W : (h + 1) * W] = softmax(k[best] @ q[h][t] / np.sqrt(W)) @ v[best]
        return out @ w["o_proj.weight"].T, sets

    def name_sets(seen):
        return [[row.nonzero().flatten().tolist() for row in token] for token in seen[0][0].transpose(0, 1)]

    compare(mixer, expected, is_causal, name_sets)


@pytest.mark.parametrize(("name", "params"), [
    ("sparge", {"block_size": 3, "threshold": 0.0}), ("fasa", {"num_tip": 2, "num_fac": T}),
    ("lsa", {"num_long_range": 64}), ("nsa", {"num_selected": 99, "select_block": 16}),
])  # fmt: skip
@pytest.mark.parametrize("is_causal", [True, False])
def test_budgets_that_cover_everything_are_dense(name, params, is_causal):
    mixer, visible = make_mixer(name, params), (j <= i if is_causal else (j < T) & (i < T))
    if name in ("sparge", "fasa"):
        check(mixer, lambda x, w: attention(x, w, visible), is_causal)
        return
    seen = recorded(mixer) if name == "nsa" else None
    x = torch.randn(1, T, 20, dtype=torch.float64)
    out = run(mixer, x, is_causal)
    if seen:
        assert seen[0].all()
        return
    q, (k,), (v,) = projections(x[0].numpy(), numpy_weights(mixer), rotated=False)
    dense = [
        np.stack([softmax(np.where(visible[t], k @ q[h][t] / np.sqrt(W), -np.inf)) @ v for t in range(T)])
        for h in range(H)
    ]
    expected = np.concatenate(dense, axis=1) @ numpy_weights(mixer)["o_proj.weight"].T
    assert_near(out[0], torch.from_numpy(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["sparge", "fasa"])
def test_training_is_dense_with_the_same_parameters(name):
    standard, mixer = make_mixer("standard"), make_mixer(name)
    mixer.load_state_dict(standard.state_dict())
    x = torch.randn(2, 3 * T, 20, dtype=torch.float64)
    assert not torch.allclose(run(mixer, x), run(standard, x))
    assert_near(run(mixer.train(), x), run(standard, x), rtol=1e-9, atol=1e-9)


def test_fasa_chunks_must_fit_the_model():
    for chunks in ([[[0]]], [[[0], [5]]], [[[0], [1]], [[0], [1]]]):
        with pytest.raises(ValueError, match="calibrate again"):
            tiny_config("fasa", mixer_params={"fasa": {"chunks": chunks}})
    assert tiny_config("fasa", mixer_params={}).params_for(0).num_tip == 5  # as many frequencies as there are
    with pytest.raises(ValueError, match="num_tip=6 exceeds"):
        tiny_config("fasa", mixer_params={"fasa": {"num_tip": 6}})
