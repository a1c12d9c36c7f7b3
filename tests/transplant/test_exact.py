"""A converted model is the same function as its host: outputs, gradients, pads, caches, `generate`, files, and back."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import frankenstein_hf as fhf
from frankenstein_hf.transplant.host import HOSTS

from ..tiny import relative_rms, tokens
from .hosts import CASES, DECODERS, EVERY, FIRST, make_host

LEFT = torch.ones(2, 17, dtype=torch.long)
LEFT[0, :4] = 0
PLACES = (LEFT.cumsum(1) - 1).clamp_min(0)


def test_every_host_is_tested():
    assert set(CASES) == set(HOSTS)


def gradients(model, x):
    model.zero_grad()
    logits = model(x).logits
    logits.sin().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_logits_and_gradients_are_the_hosts(name, case):
    host = make_host(name, case)
    model, x = fhf.from_transformers(host), tokens(2, 17)
    expected, theirs = gradients(host, x)
    actual, ours = gradients(model, x)
    assert relative_rms(actual, expected) < 1e-5
    # gradients are arranged as weights are: the way back arranges them like the host's
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(ours[parameter_name])
    arranged = dict(fhf.to_transformers(model).named_parameters())
    assert theirs.keys() == arranged.keys()
    for key, gradient in theirs.items():
        assert relative_rms(arranged[key], gradient) < 1e-4, key


@pytest.mark.parametrize(("name", "case"), FIRST)
def test_in_double_precision_nothing_is_left_but_the_angles(name, case):
    host, x = make_host(name, case).double(), tokens(2, 17)
    model = fhf.from_transformers(host)
    for module in host.modules():  # whose norms round to fp32 whatever they are given
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module)
    with torch.no_grad():
        assert relative_rms(model(x).logits, host(x).logits) < 1e-7


def rms_norm(module, x):
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return module.weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("name", "case"), FIRST)
def test_left_pads_change_nothing(name, case):
    host, x = make_host(name, case), tokens(2, 17)
    places = {"position_ids": PLACES} if HOSTS[name].causal else {}
    with torch.no_grad():
        expected = host(x, attention_mask=LEFT, **places).logits
        actual = fhf.from_transformers(host)(x, attention_mask=LEFT).logits
    assert relative_rms(actual[LEFT.bool()], expected[LEFT.bool()]) < 1e-5


@pytest.mark.parametrize(("name", "case"), DECODERS)
def test_decoding_token_by_token_gives_the_hosts_logits(name, case):
    host, x = make_host(name, case), tokens(2, 17)
    model, cache = fhf.from_transformers(host), None
    with torch.no_grad():
        expected = host(x).logits
        steps = []
        for part in x.split([9, *[1] * 8], dim=1):
            output = model(part, cache=cache, use_cache=True)
            cache = output.cache
            steps.append(output.logits)
    assert relative_rms(torch.cat(steps, 1), expected) < 1e-5


@pytest.mark.parametrize(("name", "case"), DECODERS)
def test_generate_gives_the_hosts_tokens(name, case):
    host, x = make_host(name, case), tokens(2, 17)
    model = fhf.from_transformers(host)
    for settings in ({"do_sample": False, "min_new_tokens": 9}, {"num_beams": 2}):
        common = dict(attention_mask=LEFT, max_new_tokens=9, **settings)
        assert torch.equal(model.generate(x, **common), host.generate(x, **common))


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_a_saved_host_a_saved_bundle_and_the_way_back_are_equal_to_the_bit(name, case, tmp_path):
    host, x = make_host(name, case), tokens(2, 17)
    host.save_pretrained(tmp_path / "host", max_shard_size="6KB")
    model = fhf.from_transformers(tmp_path / "host")
    model.save_pretrained(tmp_path / "ours")
    loaded = type(model).from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
    back = fhf.to_transformers(loaded, host=name)
    assert type(back) is type(host)
    before, after = host.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with torch.no_grad():
        assert torch.equal(back(x).logits, host(x).logits)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_head_of_a_host_is_converted(name):
    x = tokens(2, 17)
    x[0, 13:] = 0
    mask = (x != 0).long()
    for theirs, ours in HOSTS[name].heads.items():
        host = make_host(name, head=theirs, num_labels=3)
        model = fhf.from_transformers(host)
        assert type(model).__name__ == ours
        with torch.no_grad():
            expected, actual = host(x, attention_mask=mask)[0], model(x, attention_mask=mask)[0]
        keep = mask.bool() if expected.dim() == 3 else slice(None)
        assert relative_rms(actual[keep], expected[keep]) < 1e-5, theirs
        back = fhf.to_transformers(model)
        assert type(back) is type(host)


def test_a_dtype_is_the_hosts_or_the_one_asked_for():
    host = make_host("llama").bfloat16()
    assert fhf.from_transformers(host).dtype == torch.bfloat16
    assert fhf.from_transformers(host, dtype="float32").dtype == torch.float32


def test_the_converted_model_shares_nothing_with_the_host():
    host = make_host("llama")
    before = {key: value.clone() for key, value in host.state_dict().items()}
    model = fhf.from_transformers(host)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(before[key], value) for key, value in host.state_dict().items())


def test_the_auto_class_loads_what_was_converted(tmp_path):
    model = fhf.from_transformers(make_host("qwen3"))
    model.save_pretrained(tmp_path)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), fhf.FrankensteinForCausalLM)
