"""QuacK: the learning rates of query and key weights."""

import numpy as np
import pytest
import torch

import frankenstein_hf as fhf

from .toy import assert_equal_states, batches, language_model, train, trainer


def adam(g, lr, history):
    """A step of Adam from its gradients so far."""
    history.append(g)
    t = len(history)
    m = sum(0.1 * 0.9 ** (t - 1 - s) * x for s, x in enumerate(history)) / (1 - 0.9**t)
    v = sum(0.001 * 0.999 ** (t - 1 - s) * x**2 for s, x in enumerate(history)) / (1 - 0.999**t)
    return -lr * m / (np.sqrt(v) + 1e-8)


def test_ten_steps_equal_a_derivation():
    pattern, τ, lr = ["swa", "standard"], 0.7, 0.05
    model = language_model(layer_pattern=pattern, mixer_params={}, initializer_range=0.2).double()
    optimizer = fhf.create_optimizer(model, "adamw", lr=lr, weight_decay=0.0, stabilizers={"quack": {"tau": τ}})
    watched = {name: p for name, p in model.named_parameters() if "mixer" in name}
    w = {name: p.detach().numpy().copy() for name, p in watched.items()}
    start = {name: np.linalg.norm(x) for name, x in w.items()}
    histories = {name: [] for name in w}
    for x in batches(10):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        norms = {name: np.linalg.norm(x) for name, x in w.items()}
        for name, p in watched.items():
            other = name.replace("q_proj", "#").replace("k_proj", "q_proj").replace("#", "k_proj")
            rate = τ * lr * start[other] / norms[other] if other != name else lr
            w[name] = w[name] + adam(p.grad.numpy().copy(), rate, histories[name])
        optimizer.step()
        for name, p in watched.items():
            np.testing.assert_allclose(p.detach().numpy(), w[name], rtol=1e-6, atol=1e-9, err_msg=name)
            p.data.copy_(torch.from_numpy(w[name]))
    assert any(abs(np.linalg.norm(w[name]) / start[name] - 1) > 0.1 for name in w if "q_proj" in name)


def test_between_steps_schedulers_see_the_base_rate_also_after_an_error():
    model = language_model()
    optimizer = fhf.create_optimizer(model, "adamw", lr=0.1, groups={"attention": {"lr": 0.2}}, stabilizers=["quack"])
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    own = [group for group in optimizer.param_groups if "partner" in group]
    assert len(own) == 2 and all(group["lr"] == 0.2 and len(group["params"]) == 1 for group in own)
    assert [own[0]["partner"], own[1]["partner"]] == [own[1]["side"], own[0]["side"]]
    with torch.no_grad():
        own[0]["params"][0].mul_(2.0)  # so that the rates in a step differ
    seen = []

    def fail():
        seen.append([group["lr"] for group in own])
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fail)
    assert seen[0] == seen[1] == [0.2, pytest.approx(0.1)]
    train("adamw", model, optimizer, batches(1))
    assert [group["lr"] for group in optimizer.param_groups] == rates
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [rate / 2 for rate in rates]


def test_what_a_scheduler_sets_after_an_error_counts():
    model = language_model()
    optimizer = fhf.create_optimizer(model, "adamw", lr=0.1, stabilizers={"quack": {"tau": 0.5}})

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    train("adamw", model, optimizer, batches(1))
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_weights_of_zeros_leave_the_rate_alone():
    model = language_model()
    with torch.no_grad():
        model.model.layers[1].mixer.q_proj.weight.zero_()
    optimizer = fhf.create_optimizer(model, "sgd", stabilizers="quack")
    train("sgd", model, optimizer, batches(3))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_resumed_run_through_trainer_remembers_the_first_norms(tmp_path):
    def make(folder, seed):
        optimizer = fhf.trainer_optimizer("lion", lr=0.02, stabilizers={"quack": {"tau": 0.8}})
        return trainer(folder, language_model(seed), optimizer, lr_scheduler_type="linear")

    whole = make(tmp_path / "whole", 0)
    whole.train()
    resumed = make(tmp_path / "resumed", 7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (key, p), q in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), key
    assert_equal_states(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


def test_describe_groups_shows_them(capsys):
    text = fhf.describe_groups(language_model(), "muon", stabilizers="quack")
    assert [line for line in text.splitlines() if "q_proj" in line] == [
        "    model.layers.*.mixer.q_proj.weight [16, 16]"
    ]
    assert text.count("attention") == 3
