"""QK-clip and MuonClip: what a step does to the weights and to the logits."""

import copy
import dataclasses
import gc

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Trainer, TrainingArguments

import frankenstein_hf as fhf
from frankenstein_hf.configuration.component import describe_range
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.optim.spec import OPTIMIZERS, STABILIZERS

from ..tiny import tiny_model, tokens
from .toy import NAMES, assert_equal_states, batches, language_model, optimizer_of, saved, step, train, trainer

WITH_LOGITS = [spec.name for spec in MIXERS if spec.logits]


def model_of(name="standard", **changes):
    """Four query heads on two key heads, large logits, biases that matter."""
    values = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, attention_bias=True) | changes
    model = tiny_model(name, **values).train()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.mixer.q_proj, layer.mixer.k_proj):
                if projection.bias is not None:
                    projection.bias.normal_()
    return model


def still(model, **params):
    """An optimizer that moves nothing by itself, with qk_clip."""
    return fhf.create_optimizer(model, "sgd", lr=0.0, stabilizers={"qk_clip": params})


def learn(model, optimizer, *inputs, **kwargs):
    """A step on batches whose gradients are accumulated."""
    for x in inputs:
        model(x, labels=x, **kwargs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def largest(model, x, layer=0, **kwargs):
    with torch.no_grad():
        return model.model(x, output_max_logits=True, **kwargs).max_logits[layer].double().numpy()


def projections(model, layer=0):
    """Weights with their biases as a last column, [heads, rows · (D + 1)] of queries and keys."""
    mixer = model.model.layers[layer].mixer
    return [
        torch.cat([p.weight, p.bias[:, None]], dim=1).detach().double().numpy().reshape(heads, -1)
        for p, heads in ((mixer.q_proj, 4), (mixer.k_proj, mixer.num_key_value_heads))
    ]


@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_weights_and_biases_are_rescaled_by_the_formula(name, alpha):
    model, x = model_of(name), tokens(2, 12)
    S = largest(model, x)
    τ = np.sort(S)[1] - 1e-3  # three of four heads are above
    (q, k), optimizer = projections(model), still(model, tau=float(τ), alpha=alpha)
    others = {n: p.detach().clone() for n, p in model.named_parameters() if ".q_proj." not in n and ".k_proj." not in n}
    learn(model, optimizer, x)
    γ = np.minimum(1, τ / S)
    γ_k = γ.reshape(len(k), -1).min(1)
    if name == "memory":  # its keys are values as well
        alpha, γ_k = 1.0, np.ones(len(k))
    new_q, new_k = projections(model)
    np.testing.assert_allclose(new_q, q * γ[:, None] ** alpha, rtol=1e-5)
    np.testing.assert_allclose(new_k, k * γ_k[:, None] ** (1 - alpha), rtol=1e-5)
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters() if n in others)
    after = largest(model, x)
    if not MIXERS.get(name).takes_residual:  # there the layer's inputs change with it
        expected = S * γ**alpha * np.repeat(γ_k, 4 // len(k)) ** (1 - alpha)
        np.testing.assert_allclose(after, expected, rtol=1e-5)
        assert (after <= np.minimum(S, τ) * (1 + 1e-5)).all()


def test_heads_below_the_threshold_stay_to_the_bit():
    model, x = model_of(), tokens(2, 12)
    S = largest(model, x).reshape(2, 2)
    hot = S.max(1).argmax()  # the key head with the largest logit
    τ = float((S.max() + S[1 - hot].max()) / 2)
    before, optimizer = projections(model), still(model, tau=τ)
    learn(model, optimizer, x)
    (q, k), (new_q, new_k) = before, projections(model)
    above = S.ravel() > τ
    assert 1 <= above.sum() <= 2
    assert [np.array_equal(*pair) for pair in zip(q, new_q)] == (~above).tolist()
    assert [np.array_equal(*pair) for pair in zip(k, new_k)] == [hot != 0, hot != 1]
    # and with every head below, nothing moves at all
    learn(model, still(model, tau=1e4), x)
    assert all(np.array_equal(*pair) for pair in zip(projections(model), (new_q, new_k)))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_maximum_that_is_not_finite_changes_nothing(value, monkeypatch):
    model, x = model_of(), tokens(2, 12)
    optimizer, before = still(model, tau=0.1), projections(model)
    monkeypatch.setattr(
        "frankenstein_hf.modeling.mixers.dense.standard.dense_max_logits", lambda *_: torch.full((4,), value)
    )
    learn(model, optimizer, x)
    assert all(np.array_equal(*pair) for pair in zip(projections(model), before))


def after_one_step(prepare=lambda model: None, inputs=None, **kwargs):
    model = model_of(["standard", "swa"])
    prepare(model)
    optimizer = still(model, tau=1.0)
    learn(model, optimizer, *(inputs or [tokens(4, 12)]), **kwargs)
    return [p for layer in (0, 1) for p in projections(model, layer)]


def assert_same(actual, expected):
    untouched = [p for layer in (0, 1) for p in projections(model_of(["standard", "swa"]), layer)]
    for one, other, start in zip(actual, expected, untouched):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        assert not np.array_equal(one, start)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    checkpointing = after_one_step(lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant}))
    assert_same(checkpointing, after_one_step())


def test_accumulated_batches_count_as_one():
    assert_same(after_one_step(inputs=tokens(4, 12).split(1)), after_one_step())


def test_pads_do_not_count():
    x = tokens(4, 12)
    padded = torch.cat([tokens(4, 3, seed=9), x], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    assert_same(after_one_step(inputs=[padded], attention_mask=mask), after_one_step())


def test_packed_documents_count_as_separate_ones():
    x = tokens(4, 12)
    packed = x.reshape(1, -1)
    assert_same(after_one_step(inputs=[packed], position_ids=torch.arange(12).repeat(4)[None]), after_one_step())


def test_only_training_batches_since_the_last_step_count():
    model, x = model_of(), tokens(2, 12)
    optimizer, before = still(model, tau=0.1), projections(model)
    model.eval()
    model(x)
    model.train()
    optimizer.step()
    assert all(np.array_equal(*pair) for pair in zip(projections(model), before))
    learn(model, optimizer, x)
    once = projections(model)
    optimizer.step()
    assert all(np.array_equal(*pair) for pair in zip(projections(model), once))


def test_a_model_and_its_copies_are_left_alone_once_the_optimizer_is_gone():
    model, x = model_of(), tokens(2, 12)
    asked = []
    model.model.layers[0].mixer.register_forward_pre_hook(lambda m, args: asked.append(args[1].output_max_logits))
    optimizer = still(model, tau=0.1)
    model(x)
    copy.deepcopy(model)(tokens(2, 12, seed=3))  # records apart
    before = projections(model)
    del optimizer
    gc.collect()
    model(x)
    assert asked == [True, True, False]
    assert all(np.array_equal(*pair) for pair in zip(projections(model), before))


# ---------------------------------------------------------------------- with other optimizers


def both(name):
    """Stabilizers for `name`, those it has built in left out, tight enough to act at every step."""
    stabilizers = {"qk_clip": {"tau": 0.05}, "quack": {"tau": 0.9}}
    return {key: own for key, own in stabilizers.items() if key not in OPTIMIZERS.get(name).stabilizers}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_runs_and_resumes_exactly_with_both_stabilizers(name):
    def make(seed):
        model = language_model(seed, initializer_range=0.3).train()
        own = {"tau": 0.05} if OPTIMIZERS.get(name).stabilizers else {}
        return model, optimizer_of(name, model, stabilizers=both(name), **own)

    data = batches(6)
    whole, optimizer = make(0)
    start = whole.model.layers[1].mixer.q_proj.weight.norm()
    losses = train(name, whole, optimizer, data)
    assert np.isfinite(losses).all()
    assert whole.model.layers[1].mixer.q_proj.weight.norm() < 0.8 * start  # it was clipped
    half, first = make(0)
    train(name, half, first, data[:3])
    resumed, second = make(5)
    resumed.load_state_dict(half.state_dict())
    second.load_state_dict(saved(first))
    train(name, resumed, second, data[3:])
    for (key, p), q in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(p, q[1]), key
    assert_equal_states(second.state_dict(), optimizer.state_dict())


def test_muon_clip_is_muon_with_qk_clip():
    data, results = batches(4), []
    for name, extra in (("muon_clip", {"tau": 0.3, "alpha": 0.7}), ("muon", {"stabilizers": {"qk_clip": {}}})):
        model = language_model(initializer_range=0.3).train()
        if name == "muon":
            extra["stabilizers"]["qk_clip"] = {"tau": 0.3, "alpha": 0.7}
        train(name, model, fhf.create_optimizer(model, name, **extra), data)
        results.append(dict(model.named_parameters()))
    assert all(torch.equal(p, results[1][key]) for key, p in results[0].items())
    plain = language_model(initializer_range=0.3).train()
    train("muon", plain, fhf.create_optimizer(plain, "muon"), data)
    assert not all(torch.equal(p, results[0][key]) for key, p in plain.named_parameters())


def test_both_iterates_of_schedule_free_training_are_rescaled_alike():
    models = [language_model(initializer_range=0.3).train() for _ in range(2)]
    optimizers = [
        fhf.create_optimizer(model, "schedulefree_adamw", lr=0.05, stabilizers={"qk_clip": {"tau": τ}})
        for model, τ in zip(models, (0.05, 1e4))
    ]
    for model, optimizer in zip(models, optimizers):
        train("schedulefree_adamw", model, optimizer, batches(1))
    weights = [model.model.layers[1].mixer.q_proj.weight for model in models]
    z = [optimizer.state[p]["z"] for p, optimizer in zip(weights, optimizers)]
    for clipped, free in (weights, z):
        ratio = (clipped / free).detach().view(2, -1)
        assert (ratio.mean(1) < 0.9).all()
        torch.testing.assert_close(ratio, ratio.mean(1, keepdim=True).expand_as(ratio), rtol=1e-4, atol=0)


# ---------------------------------------------------------------------- transformers' Trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_clips_after_every_update(tmp_path, accumulation):
    model = language_model(initializer_range=0.3)
    run = trainer(
        tmp_path,
        model,
        optim="frankenstein_adamw",
        optim_args="qk_clip.tau=0.2, qk_clip.alpha=0.4",
        learning_rate=1e-9,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    run.train()
    after = [fhf.FrankensteinModel.__call__(model.model, x, output_max_logits=True).max_logits[1] for x in batches(4)]
    assert torch.stack(after).max() <= 0.2 * (1 + 1e-5)
    assert torch.stack(after).max() > 0.05  # not crushed by clipping once a batch of the accumulation too many


def test_trainer_knows_muon_clip_by_name(tmp_path):
    model = language_model(initializer_range=0.3)
    trainer(tmp_path, model, optim="frankenstein_muon_clip", optim_args="tau=0.2", learning_rate=1e-9).train()
    logits = [model.model(x, output_max_logits=True).max_logits[1] for x in batches(4)]
    assert torch.stack(logits).max() <= 0.2 * (1 + 1e-5)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", STABILIZERS.names())
def test_models_that_cannot_be_stabilized_are_refused(name):
    def create(model):
        return fhf.create_optimizer(model, "adamw", stabilizers=name)

    with pytest.raises(ValueError, match="no layer of the model"):
        create(tiny_model(["mamba", "gla"]))
    with pytest.raises(ValueError, match="no layer of the model"):
        create(torch.nn.Linear(2, 2))
    model = tiny_model("standard")
    model.model.layers[0].mixer.k_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.0.*k_proj \(.*Linear, weight frozen"):
        create(model)
    frozen = tiny_model(["standard", "standard"])
    frozen.model.layers[0].requires_grad_(False)
    before = frozen.model.layers[0].mixer.q_proj.weight.clone()
    optimizer = create(frozen)
    step("adamw", optimizer, lambda: frozen.train()(tokens(2, 5), labels=tokens(2, 5)).loss)
    assert torch.equal(frozen.model.layers[0].mixer.q_proj.weight, before)


@pytest.mark.parametrize("name", STABILIZERS.names())
def test_adapters_on_queries_and_keys_are_refused(name):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("standard"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="no adapters on them"):
        fhf.create_optimizer(model, "adamw", stabilizers=name)


def test_wrong_names_and_parameters_raise_at_once():
    model = tiny_model("standard")
    for create in (
        lambda **kw: fhf.create_optimizer(model, "adamw", **kw),
        lambda **kw: fhf.trainer_optimizer("adamw", **kw),
    ):
        with pytest.raises(ValueError, match="did you mean 'qk_clip'"):
            create(stabilizers=["qkclip"])
        with pytest.raises(ValueError, match="did you mean 'tau'"):
            create(stabilizers={"qk_clip": {"tua": 1.0}})
        with pytest.raises(ValueError, match="names"):
            create(stabilizers=3)
    for spec in STABILIZERS:
        for field in dataclasses.fields(spec.params):
            assert field.metadata["doc"]
            with pytest.raises(ValueError) as caught:
                fhf.create_optimizer(model, "adamw", stabilizers={spec.name: {field.name: -1.0}})
            assert describe_range(field) in str(caught.value)
    with pytest.raises(ValueError, match="built in"):
        fhf.create_optimizer(model, "muon_clip", stabilizers=["qk_clip"])
    assert fhf.list_stabilizers() == sorted(spec.name for spec in STABILIZERS)
    assert fhf.stabilizer_spec("quack").params().tau == 1.0


def test_a_cache_given_by_position_is_left_alone():
    model = model_of().train()
    optimizer = still(model, tau=0.5)
    model.model(tokens(1, 4), None, None, DynamicCache(config=model.config))
    assert optimizer is not None


def test_a_step_that_saw_no_forward_pass_warns(monkeypatch):
    said = []
    monkeypatch.setattr("frankenstein_hf.optim.qk_clip.logger.warning_once", said.append)
    model = model_of().train()
    optimizer = still(model, tau=0.5)
    learn(model, optimizer, tokens(2, 9))
    assert not said
    optimizer.step()
    assert len(said) == 1 and "no forward pass" in said[0]


def test_optim_args_name_stabilizers_by_their_parameters(tmp_path):
    for text, message in (
        ("qkclip.tau=3", "unknown 'qkclip'.*did you mean 'qk_clip'"),
        ("stabilizers=quack", "one of its parameters"),
        ("qk_clip=1", "one of its parameters"),
    ):
        args = TrainingArguments(str(tmp_path), optim="frankenstein_lion", optim_args=text, report_to=[], use_cpu=True)
        with pytest.raises(ValueError, match=message):
            Trainer(language_model(), args).create_optimizer()
    with pytest.raises(ValueError, match="stabilizers must be names"):
        fhf.create_optimizer(language_model(), "lion", stabilizers=[("qk_clip", {"tau": 3})])
