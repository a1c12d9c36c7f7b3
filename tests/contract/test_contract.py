"""What every registered mixer must honour, in every mode its spec claims (design page, section 5)."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.cache import cache_num_bytes

from ..tiny import (
    ALL_MIXERS,
    BIDIRECTIONAL,
    CAUSAL,
    MODES,
    assert_near,
    relative_rms,
    tiny_model,
    tokens,
)

every_mode = pytest.mark.parametrize(("name", "is_causal"), MODES)
every_causal = pytest.mark.parametrize("name", sorted(CAUSAL))
LONG = 70  # more than a chunk of 64


def other_token(x: torch.Tensor, t: int) -> torch.Tensor:
    changed = x.clone()
    changed[:, t] = (changed[:, t] - 2) % 50 + 3
    return changed


# 1 -------------------------------------------------------------------------------------------------------------------


@every_causal
def test_causal_outputs_do_not_change_bit_for_bit_when_a_later_token_does(name):
    model, x = tiny_model([name, name]), tokens(2, LONG)
    with torch.no_grad():
        expected = model(x).logits
        for t in (1, 31, 40, 65, LONG - 1):
            changed = model(other_token(x, t)).logits
            assert torch.equal(changed[:, :t], expected[:, :t]), f"token {t} leaks into the past"
            assert not torch.equal(changed[:, t], expected[:, t])


# 2 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BIDIRECTIONAL))
def test_bidirectional_outputs_depend_on_both_sides(name):
    model, x = tiny_model(name, is_causal=False), tokens(1, 15)
    params = model.config.params_for(0)
    reach = MIXERS.get(name).reach(params) or 5
    t = 8
    with torch.no_grad():
        expected = model(x).logits[0, t]
        for source in (t - reach, t - 1, t + 1, t + reach):
            assert not torch.equal(model(other_token(x, source)).logits[0, t], expected), f"blind to token {source}"


# 3 -------------------------------------------------------------------------------------------------------------------

PADDINGS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "interior": [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1],
}


@every_mode
def test_pads_change_no_real_token_wherever_they_are(name, is_causal):
    model, real = tiny_model([name, name], is_causal), tokens(1, 9)
    with torch.no_grad():
        expected = model(real).logits[0]
        rows, masks = [], []
        for padding in PADDINGS.values():
            mask = torch.tensor([padding])
            x = tokens(1, 12, seed=9)
            x[mask.bool()] = real[0]
            rows.append(x)
            masks.append(mask)
            alone = model(x, attention_mask=mask).logits
            assert alone.isfinite().all()
            assert_near(alone[mask.bool()], expected)
        batch = model(torch.cat(rows), attention_mask=torch.cat(masks)).logits
        for logits, mask in zip(batch, masks):
            assert_near(logits[mask[0].bool()], expected)


@every_mode
def test_whatever_stands_at_a_pad_is_never_read(name, is_causal):
    model, x = tiny_model(name, is_causal), tokens(2, 12)
    mask = torch.tensor([PADDINGS["interior"], PADDINGS["left"]])
    needs_ids = MIXERS.get(name).needs_input_ids
    embeds = model.get_input_embeddings()(x).detach()
    poisoned = embeds.masked_fill(~mask.bool()[..., None], float("nan")).requires_grad_()
    ids = {"input_ids": x} if needs_ids else {}
    expected = model(inputs_embeds=embeds, attention_mask=mask, **ids).logits[mask.bool()]
    actual = model(inputs_embeds=poisoned, attention_mask=mask, **ids).logits
    assert torch.equal(actual[mask.bool()], expected)
    assert actual.isfinite().all()
    actual.sum().backward()
    assert poisoned.grad.isfinite().all() and (poisoned.grad[~mask.bool()] == 0).all()


@every_mode
def test_a_row_of_pads_only_is_finite(name, is_causal):
    model = tiny_model(name, is_causal)
    mask = torch.tensor([[0] * 7, [1] * 7])
    output = model(tokens(2, 7), attention_mask=mask, labels=tokens(2, 7))
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# 4 -------------------------------------------------------------------------------------------------------------------

LENGTHS = (5, 1, 20, 2)


def packing_arguments(convention: str) -> dict:
    numbers = torch.tensor([[i for i, n in enumerate(LENGTHS) for _ in range(n)]])
    if convention == "position_ids":
        return {"position_ids": torch.tensor([[p for n in LENGTHS for p in range(n)]])}
    if convention == "seq_idx":
        return {"seq_idx": numbers}
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 20, "max_length_k": 20}


@every_mode
def test_packed_documents_equal_separate_sequences_gradients_too(name, is_causal):
    model = tiny_model([name, name], is_causal)
    documents = [tokens(1, n, seed=i) for i, n in enumerate(LENGTHS)]
    weights = [torch.randn(1, n, 61, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    expected = torch.cat([model(x).logits for x in documents], dim=1)
    (expected * torch.cat(weights, dim=1)).sum().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    for convention in ("position_ids", "seq_idx", "cu_seq_lens_q"):
        model.zero_grad()
        packed = model(torch.cat(documents, dim=1), **packing_arguments(convention)).logits
        assert_near(packed, expected)
        (packed * torch.cat(weights, dim=1)).sum().backward()
        for key, p in model.named_parameters():
            if key in gradients:
                assert relative_rms(p.grad, gradients[key]) < 1e-4, (convention, key)


# 5 -------------------------------------------------------------------------------------------------------------------


@every_causal
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prefill_in_any_split_and_decoding_equal_the_full_forward(name, dtype):
    model, x = tiny_model([name, name]).to(dtype), tokens(2, 14)
    # these weights magnify a rounding error of fp32 up to a hundredfold: single logits can be compared in fp64 only
    allowed = 1e-5 if dtype == torch.float32 else 1e-12
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        for splits in ((9, 1, 1, 1, 1, 1), (1, 1, 12), (4, 6, 1, 3)):
            cache, start = DynamicCache(config=model.config), 0
            for size in splits:
                part = model(x[:, start : start + size], cache=cache)
                assert relative_rms(part.logits, expected[:, start : start + size]) < allowed
                if dtype == torch.float64:
                    assert_near(part.logits, expected[:, start : start + size], rtol=1e-8, atol=1e-11)
                start += size
            assert [layer.get_seq_length() for layer in cache.layers] == [14, 14]
            assert all(layer.num_real.tolist() == [14, 14] for layer in cache.layers)


def scattered_mask(rows: int, length: int) -> torch.Tensor:
    """Pads anywhere; the last row has two real tokens among its first dozen, fewer than any window."""
    mask = (torch.rand(rows, length, generator=torch.Generator().manual_seed(5)) < 0.6).long()
    mask[-1, :12] = 0
    mask[-1, [4, 9]] = 1
    return mask


@every_causal
def test_cached_calls_with_pads_equal_the_unpadded_rows(name):
    """Pads in the prefill, in single tokens and in later calls longer than a window."""
    model, x, mask = tiny_model([name, name]), tokens(4, 26), scattered_mask(4, 26)
    with torch.no_grad():
        expected = [model(row[keep.bool()][None]).logits[0] for row, keep in zip(x, mask)]
        cache, parts = DynamicCache(config=model.config), []
        for begin, end in ((0, 12), (12, 13), (13, 14), (14, 25), (25, 26)):
            parts.append(model(x[:, begin:end], attention_mask=mask[:, :end], cache=cache).logits)
            assert all(layer.num_real.tolist() == mask[:, :end].sum(1).tolist() for layer in cache.layers)
        for logits, keep, row in zip(torch.cat(parts, dim=1), mask, expected):
            assert_near(logits[keep.bool()], row)
        # the cache remembers its pads: the mask of the new tokens alone is enough
        again = DynamicCache(config=model.config)
        model(x[:, :12], attention_mask=mask[:, :12], cache=again)
        last = model(x[:, 12:13], attention_mask=mask[:, 12:13], cache=again)
        assert_near(last.logits[mask[:, 12].bool()], parts[1][mask[:, 12].bool()])


@every_causal
def test_generate_with_cache_equals_without(name):
    model, x = tiny_model(name), tokens(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    common = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
    for how in (dict(do_sample=False), dict(do_sample=True, top_k=20), dict(num_beams=3, do_sample=False)):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            outputs.append(model.generate(x, use_cache=use_cache, **how, **common))
        assert torch.equal(*outputs), how
    chunked = model.generate(x, do_sample=False, prefill_chunk_size=3, **common)
    assert torch.equal(chunked, model.generate(x, do_sample=False, **common))


@every_causal
def test_a_static_cache_generates_the_same(name):
    model, x = tiny_model([name, name]), tokens(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    common = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, pad_token_id=0, do_sample=False)
    for how in ({}, dict(num_beams=3), dict(prefill_chunk_size=3)):
        expected = model.generate(x, **how, **common)
        assert torch.equal(model.generate(x, cache_implementation="static", **how, **common), expected), how


# 6 -------------------------------------------------------------------------------------------------------------------


@every_causal
def test_a_cropped_cache_continues_as_if_the_tokens_had_never_been(name):
    model, x = tiny_model([name, name]), tokens(2, 16)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        model(x[:, :5], cache=cache)
        cache.activate_past_recording()
        wrong = tokens(2, 16, seed=7)
        model(x[:, 5:8], cache=cache)
        model(torch.cat([x[:, 8:9], wrong[:, :3]], dim=1), cache=cache)
        cache.crop(-3)  # into a call
        assert_near(model(x[:, 9:10], cache=cache).logits, expected[:, 9:10])
        cache.crop(0)
        model(wrong[:, :2], cache=cache)
        cache.crop(-4)  # across calls, to 8
        assert [layer.num_real.tolist() for layer in cache.layers] == [[8, 8], [8, 8]]
        assert_near(model(x[:, 8:12], cache=cache).logits, expected[:, 8:12])
        cache.crop(-7)  # to where recording began
        assert_near(model(x[:, 5:], cache=cache).logits, expected[:, 5:])
        if not MIXERS.get(name).grows:
            with pytest.raises(ValueError, match="recording began at 5"):
                cache.crop(-12)


@every_causal
def test_rollback_counts_real_tokens_when_the_undone_ones_hold_pads(name):
    model, x, mask = tiny_model([name, name]), tokens(4, 20), scattered_mask(4, 20)
    with torch.no_grad():
        expected = [model(row[keep.bool()][None]).logits[0] for row, keep in zip(x, mask)]
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        for begin, end in ((0, 5), (5, 14)):
            model(x[:, begin:end], attention_mask=mask[:, :end], cache=cache)
        cache.crop(-4)
        assert all(layer.num_real.tolist() == mask[:, :10].sum(1).tolist() for layer in cache.layers)
        rest = model(x[:, 10:], attention_mask=mask, cache=cache).logits
        for logits, keep, row in zip(rest, mask, expected):
            assert_near(logits[keep[10:].bool()], row[keep[:10].sum() :])


@every_causal
def test_a_cropped_cache_reorders_and_copies_pads_included(name):
    model, x, mask = tiny_model(name), tokens(4, 12), scattered_mask(4, 12)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(x[:, :10], attention_mask=mask[:, :10], cache=cache)
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([2, 3, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 2, 1]))
        rows = [0, 2, 3, 2]
        assert all(layer.num_real.tolist() == mask[rows, :8].sum(1).tolist() for layer in cache.layers)
        for kept in (copy.deepcopy(cache), cache):
            # without the mask of the past: the cache itself must know its pads
            logits = model(x[rows, 8:], attention_mask=mask[rows, 8:], cache=kept).logits
            for row, out in zip(rows, logits):
                keep = mask[row].bool()
                expected = model(x[row][keep][None]).logits[0, keep[:8].sum() :]
                assert_near(out[keep[8:]], expected)


@every_causal
def test_assisted_decoding_and_prompt_lookup_equal_greedy(name):
    model = tiny_model(name)
    x = tokens(1, 4).repeat(1, 3)
    common = dict(max_new_tokens=10, min_new_tokens=10, do_sample=False)
    expected = model.generate(x, **common)
    assert torch.equal(model.generate(x, prompt_lookup_num_tokens=3, **common), expected)
    assistant = tiny_model(name, seed=5)
    assert torch.equal(model.generate(x, assistant_model=assistant, **common), expected)


# 7 -------------------------------------------------------------------------------------------------------------------


@every_causal
def test_decode_state_has_the_size_the_spec_says(name):
    spec, model = MIXERS.get(name), tiny_model(name)
    arguments = (model.config.params_for(0), model.config)
    sizes = []
    with torch.no_grad():
        for T in (20, 40):
            cache = DynamicCache(config=model.config)
            model(tokens(1, T), cache=cache)
            sizes.append(cache_num_bytes(cache))
    layer, floats = cache.layers[0], 4  # bytes
    if spec.grows:
        assert sizes[1] - sizes[0] == 20 * floats * spec.token_size(*arguments)
    else:
        assert sizes[1] == sizes[0], "the state grows"
        kept = sum(x.numel() for x in layer.states.values() if x.is_floating_point())
        assert kept == spec.state_size(*arguments)


# 8 and 11 ------------------------------------------------------------------------------------------------------------


@every_mode
def test_fast_form_agrees_with_the_eager_one_at_every_length(name, is_causal):
    model = tiny_model(name, is_causal)
    eager = tiny_model(name, is_causal, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        for T in (*range(1, 10), 33, 65, LONG):
            x = tokens(2, T)
            assert relative_rms(model(x).logits, eager(x).logits) < 1e-5, T


@every_mode
def test_saved_and_loaded_weights_and_logits_are_equal(name, is_causal, tmp_path):
    model, x = tiny_model([name, name], is_causal), tokens(2, 9)
    model.save_pretrained(tmp_path, save_code=False)
    loaded = type(model).from_pretrained(tmp_path).eval()
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)


# 9 -------------------------------------------------------------------------------------------------------------------


def run_with_selections(model, x):
    """Logits, and of mixers that select keys what each token selected, [tokens, …]; None of others."""
    mixer, selected = model.model.layers[0].mixer, []
    if (select := getattr(mixer, "select", None)) is None:
        return model(x).logits, None

    def recording(*args, **kwargs):
        result = select(*args, **kwargs)
        selected.append((result[0] if isinstance(result, tuple) else result).movedim(-2, 0).flatten(1))
        return result

    mixer.select = recording
    try:
        return model(x).logits, torch.cat(selected) if selected else None
    finally:
        del mixer.select


@every_mode
def test_half_precision_stays_close(name, is_causal):
    """Where rounding made a mixer select other keys, there is nothing to compare: sets first, then numbers."""
    model, x = tiny_model(name, is_causal), tokens(1, 300)

    def assert_close(half, full):
        (logits, selected), (expected, wanted) = half, full
        if selected is not None:
            same = (selected == wanted).all(1)
            assert same.float().mean() > 0.5
            logits, expected = logits[:, same], expected[:, same]
        assert relative_rms(logits, expected) < 2e-2

    with torch.no_grad():
        expected = run_with_selections(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(run_with_selections(model, x), expected)
        half = copy.deepcopy(model).to(torch.bfloat16)
        # the weights themselves are rounded: compare with the same weights in fp32
        rounded = copy.deepcopy(half).to(torch.float32)
        assert_close(run_with_selections(half, x), run_with_selections(rounded, x))


@every_mode
def test_half_precision_gradients_are_finite(name, is_causal):
    model, x = tiny_model(name, is_causal).train(), tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# 10 ------------------------------------------------------------------------------------------------------------------


@every_mode
def test_gradients_pass_gradcheck(name, is_causal):
    spec = MIXERS.get(name)
    if spec.gradient != "exact":
        pytest.skip("the spec claims a surrogate gradient; its own test compares with the written surrogate")
    model = tiny_model(name, is_causal, hidden_size=6, head_dim=3, intermediate_size=4).double()
    x = tokens(1, 7)
    embeds = model.get_input_embeddings()(x).detach()
    mixer_parameters = dict(model.model.layers[0].mixer.named_parameters())
    names = list(mixer_parameters)
    ids = {"input_ids": x} if spec.needs_input_ids else {}

    def run(inputs_embeds, *values):
        weights = {f"layers.0.mixer.{key}": value for key, value in zip(names, values)}
        call = dict(inputs_embeds=inputs_embeds, use_cache=False, **ids)
        return torch.func.functional_call(model.model, weights, kwargs=call).last_hidden_state

    values = [p.detach().requires_grad_() for p in mixer_parameters.values()]
    assert torch.autograd.gradcheck(run, (embeds.requires_grad_(), *values), fast_mode=True)


@every_mode
def test_eager_form_is_twice_differentiable(name, is_causal):
    model = tiny_model(name, is_causal, attn_implementation="eager").double()
    x = tokens(1, 5)
    embeds = model.get_input_embeddings()(x).detach().requires_grad_()
    ids = {"input_ids": x} if MIXERS.get(name).needs_input_ids else {}
    loss = model(inputs_embeds=embeds, use_cache=False, **ids).logits.square().sum()
    (gradient,) = torch.autograd.grad(loss, embeds, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), embeds)
    assert second.isfinite().all() and second.abs().sum() > 0


@every_mode
def test_gradient_checkpointing_changes_no_gradient(name, is_causal):
    model, x = tiny_model([name, name], is_causal).train(), tokens(2, 12)
    mask = torch.tensor([PADDINGS["left"], PADDINGS["interior"]])
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(x, attention_mask=mask, labels=x).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


@every_mode
def test_every_parameter_receives_a_gradient_within_three_steps(name, is_causal):
    model = tiny_model([name, name], is_causal, tie_word_embeddings=False).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    waiting = {key for key, _ in model.named_parameters()}
    for step in range(3):
        x = tokens(2, 12, seed=step)
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        waiting -= {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        optimizer.step()
    assert not waiting


# 12 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["all-linear", None])  # None: the mixers' projections
@pytest.mark.parametrize("name", ALL_MIXERS)
def test_lora_reaches_every_projection(name, targets):
    peft = pytest.importorskip("peft")
    model = tiny_model(name, is_causal=MIXERS.get(name).causal).train()
    with torch.no_grad():  # a gate that begins closed lets nothing through at first
        for parameter in model.parameters():
            if not parameter.any():
                parameter.fill_(0.1)
    linears = {key for key, m in model.named_modules() if isinstance(m, torch.nn.Linear) and key != "lm_head"}
    if targets is None:
        linears = {key for key in linears if ".mixer." in key}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    x = tokens(2, 9)
    adapted(input_ids=x, labels=x).loss.backward()
    with_gradient = {
        key.removeprefix("base_model.model.").split(".lora_A")[0]
        for key, p in adapted.named_parameters()
        if "lora_A" in key and p.grad is not None and p.grad.abs().sum() > 0
    }
    assert with_gradient == linears


class OpaqueLinear(torch.nn.Module):
    """A projection without a readable weight, as quantised ones are."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.call = lambda x: F.linear(x, *hidden)
        hidden = [linear.weight.detach(), None if linear.bias is None else linear.bias.detach()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


class OpaqueWeight:
    """The weight of an ordinary linear layer that does nothing but take part in linear maps, as torchao's do."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype, self.device, self.call = weight.dtype, weight.device, lambda x, bias: F.linear(x, weight, bias)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is F.linear, f"{function} of a quantised weight"
        return args[1].call(args[0], args[2])


def opaque_weight(linear: torch.nn.Linear) -> torch.nn.Linear:
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = OpaqueWeight(weight)
    return linear


@pytest.mark.parametrize("disguised", [OpaqueLinear, opaque_weight])
@every_causal
def test_projections_are_called_as_modules(name, disguised):
    model, x = tiny_model(name), tokens(2, 9)
    with torch.no_grad():
        expected = model.generate(x, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        for key, module in list(model.model.layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                model.model.layers.set_submodule(key, disguised(module))
        assert torch.equal(model.generate(x, max_new_tokens=4, min_new_tokens=4, do_sample=False), expected)


# 13 ------------------------------------------------------------------------------------------------------------------


@every_mode
def test_resizing_the_vocabulary_resizes_every_table(name, is_causal, tmp_path):
    model, x = tiny_model(name, is_causal), tokens(1, 6)
    with torch.no_grad():
        expected = model(x).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        grown = model(x).logits
        assert_near(grown[..., :61], expected)
        longer = x.clone()
        longer[0, 3] = 69  # an id that did not exist
        assert model(longer).logits.isfinite().all()
        model.save_pretrained(tmp_path, save_code=False)
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(x).logits, grown)
