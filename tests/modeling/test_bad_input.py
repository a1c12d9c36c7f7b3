"""Bad input is refused before anything is computed, with a message that names the thing and the remedy."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import frankenstein_hf as fhf
from frankenstein_hf.auto import head_class
from frankenstein_hf.configuration.component import MixerSpec
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.context import Batch, make_context
from frankenstein_hf.modeling.hub_bundle import HEADS
from frankenstein_hf.modeling.mixers.dense.standard import StandardAttention
from frankenstein_hf.modeling.modeling_frankenstein import FrankensteinModel

from ..tiny import tiny_config, tiny_model, tokens

X = tokens(2, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "exactly one of input_ids and inputs_embeds; got neither"),
        (dict(input_ids=X, inputs_embeds=torch.zeros(2, 6, 20)), "exactly one .* got both"),
        (dict(input_ids=X[0]), r"input_ids must be \[batch, tokens\].*got \[6\]"),
        (dict(inputs_embeds=torch.zeros(6, 20)), "inputs_embeds"),
        (dict(input_ids=X[:0]), "The batch is empty: got 0 sequences"),
        (dict(input_ids=X[:, :0]), "0 tokens"),
        (dict(input_ids=X, attention_mask=torch.ones(2, 5)), r"attention_mask must be \[2, 6\], got \[2, 5\]"),
        (dict(input_ids=X, attention_mask=torch.ones(6)), "2 or 4 dimensions"),
        (dict(input_ids=X, attention_mask=torch.ones(2, 1, 6, 5).bool()), r"\[2 or 1, heads or 1, 6, 6\]"),
        (dict(input_ids=X, attention_mask=torch.ones(2, 1, 6, 6).long()), "bool .*or additive, got torch.int64"),
        (dict(input_ids=X, attention_mask={"full_attention": None}), "must be a tensor"),
        (dict(input_ids=X, position_ids=torch.zeros(2, 5).long()), r"position_ids must be \[2, 6\]"),
        (dict(input_ids=X, seq_idx=torch.zeros(2, 5).long()), r"seq_idx must be \[2, 6\]"),
        (dict(input_ids=X, cu_seq_lens_q=torch.tensor([0, 3, 6])), "batch of one"),
        (dict(input_ids=X[:1], cu_seq_lens_q=torch.tensor([0, 3])), "increase from 0 to 6"),
        (dict(input_ids=X[:1], cu_seq_lens_q=torch.tensor([1, 6])), "increase from 0 to 6"),
        (dict(input_ids=X[:1], cu_seq_lens_q=torch.tensor([0, 4, 3, 6])), "increase from 0 to 6"),
        (dict(input_ids=X[:1], cu_seq_lens_q=torch.tensor([0, 3, 3, 6])), "increase from 0 to 6"),
        (dict(input_ids=X[:1], cu_seq_lens_q=torch.tensor([])), "increase from 0 to 6"),
        (dict(inputs_embeds=torch.zeros(2, 6, 19)), r"inputs_embeds must be \[2, 6, 20\], got \[2, 6, 19\]"),
        (dict(input_ids=X + 60), r"input_ids must be from 0 to 60 .*len\(tokenizer\)"),
        (dict(input_ids=X - 9), "input_ids must be from 0 to 60"),
        (dict(input_ids=X, labels=X + 60), "labels must be from 0 to 60"),
        (dict(input_ids=X, cache=3), "cache must be a transformers Cache"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tiny_model("standard")(**arguments)


def test_a_cache_refuses_what_it_cannot_serve():
    model = tiny_model(["standard", "gla"])
    cache = model(X).cache
    with pytest.raises(ValueError, match=r"\[2, 1\] or \[2, 7\]"):
        model(X[:, :1], attention_mask=torch.ones(2, 4), cache=cache)
    with pytest.raises(ValueError, match="packed documents, which cannot share a cache"):
        model(X, seq_idx=torch.zeros_like(X), cache=cache)
    with pytest.raises(ValueError, match=r"made for other layers.*DynamicCache\(config=model.config\)"):
        tiny_model(["gla", "gla"])(X, cache=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="no cache"):
        tiny_model("gla", is_causal=False).model(X, cache=DynamicCache(config=tiny_config("gla")))
    with pytest.raises(ValueError, match=r"the past is not recorded.*activate_past_recording"):
        cache.layers[1].crop(-2)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(2)
    with pytest.raises(ValueError, match="Cannot remove 99 tokens"):
        cache.crop(-99)


def test_memory_needs_token_ids():
    model = tiny_model("memory")
    embeds = model.get_input_embeddings()(X)
    with pytest.raises(ValueError, match=r"'memory' .* needs input_ids"):
        model(inputs_embeds=embeds)
    assert torch.equal(model(input_ids=X, inputs_embeds=embeds).logits, model(X).logits)
    for wrong in (X[:1], X[:, :3], torch.cat([X, X])):
        with pytest.raises(ValueError, match=r"inputs_embeds must be .* as input_ids say"):
            model(input_ids=wrong, inputs_embeds=embeds)


HEAD_CLASSES = [head_class(reference) for reference in HEADS.values()]


@pytest.mark.parametrize("head", HEAD_CLASSES, ids=lambda head: head.__name__)
def test_every_head_passes_on_what_is_known_and_names_what_is_not(head):
    model = head(tiny_config("gla")).eval()
    x = X[:, None].expand(-1, 3, -1) if "MultipleChoice" in head.__name__ else X
    mask = torch.ones_like(x)
    plain = model(x, attention_mask=mask)
    for known in (dict(use_cache=False), dict(use_cache=True), dict(token_type_ids=torch.zeros_like(x)),
                  dict(output_hidden_states=True), dict(return_dict=True), dict(num_items_in_batch=4),
                  dict(head_mask=None)):  # fmt: skip
        known = {
            key: value for key, value in known.items() if key != "num_items_in_batch" or head is not FrankensteinModel
        }
        again = model(x, attention_mask=mask, **known)
        assert torch.equal(again[0], plain[0])
    for wrong, near in (("attention_masks", "attention_mask"), ("label", "labels"), ("positions_ids", "position_ids")):
        with pytest.raises(TypeError, match=f"no argument '{wrong}' here; did you mean '{near}'"):
            model(x, **{wrong: mask})
    with pytest.raises(TypeError, match="'output_router_logits'"):
        model(x, output_router_logits=True)


def test_a_mixer_that_keeps_nothing_is_named_before_it_generates_nonsense(monkeypatch):
    class Forgetful(StandardAttention):
        """Attention without its past."""

        def forward(self, hidden_states, context, cache=None):
            return super().forward(hidden_states, context, None)

    MIXERS.names()
    monkeypatch.setattr(MIXERS, "_specs", dict(MIXERS._specs))
    fhf.register_mixer(MixerSpec(name="forgetful", family="test", summary="", reference=""), Forgetful)
    for pattern in (["forgetful"], ["standard", "forgetful"], ["forgetful", "gla"]):
        model = tiny_model(pattern)
        with pytest.raises(ValueError, match=r"'forgetful' keeps nothing in the cache.*use_cache=False"):
            model.generate(X, max_new_tokens=2, do_sample=False)
        model.generate(X, max_new_tokens=2, do_sample=False, use_cache=False)


def test_an_unknown_backend_is_answered_in_a_whole_sentence():
    with pytest.raises(ValueError, match="while they are built, the name of a mixer; did you mean 'gla'"):
        tiny_model("swa").set_attn_implementation("glaa")


def test_a_mixer_without_the_mode_is_refused_by_the_head(monkeypatch):
    MIXERS.names()
    monkeypatch.setattr(MIXERS, "_specs", dict(MIXERS._specs))
    standard = MIXERS.get("standard")
    common = dict(family="test", summary="", reference="", implementation=standard.implementation)
    MIXERS.register(MixerSpec(name="both_ways", causal=False, **common))
    MIXERS.register(MixerSpec(name="one_way", bidirectional=False, **common))
    with pytest.raises(ValueError, match=r"'both_ways' has no causal form; choose one of .*gla"):
        fhf.FrankensteinForCausalLM(tiny_config("both_ways"))
    with pytest.raises(ValueError, match="'one_way' has no bidirectional form"):
        fhf.FrankensteinForMaskedLM(tiny_config("one_way"))
    fhf.FrankensteinForMaskedLM(tiny_config("both_ways"))
    fhf.FrankensteinForCausalLM(tiny_config("one_way"))


def test_a_checkpoint_of_another_pattern_is_refused(tmp_path):
    tiny_model(["gla", "standard"]).save_pretrained(tmp_path, save_code=False)
    config = json.loads((tmp_path / "config.json").read_text())
    for pattern, layers, message in (
        (
            ["standard", "gla"],
            2,
            r"missing .*layers\.1\.mixer\.decay_up_proj.*without a place .*layers\.0\.mixer\.g_proj",
        ),
        (["standard", "standard"], 2, r"missing nothing, without a place .*decay_down_proj"),
        (["gla", "standard"], 4, r"missing .*layers\.2\."),
        (["gla"], 1, r"without a place .*layers\.1\.mixer"),
    ):
        changed = {**config, "layer_pattern": pattern, "num_hidden_layers": layers, "mixer_params": {}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"(?s)does not fit the configuration.*{message}"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_or_corrupt_checkpoint_is_named(tmp_path):
    tiny_model("standard").save_pretrained(tmp_path, save_code=False)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b"\xff" * len(whole)):
        file.write_bytes(broken)
        with pytest.raises(OSError, match="truncated or corrupt"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_bytes(whole)
    weights = load_file(file)
    weights["model.layers.0.mixer.q_proj.weight"] = torch.zeros(3, 20)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj.weight \(\[3, 20\] saved, \[20, 20\] built\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_unknown_key_in_a_saved_config_is_refused(tmp_path):
    tiny_model("standard").save_pretrained(tmp_path, save_code=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_patern": "gla"}))
    with pytest.raises(ValueError, match="'layer_patern'; did you mean 'layer_pattern'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_make_context_counts_positions_in_real_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    batch = Batch((2, 5), mask.device, mask, position_ids=torch.tensor([[9, 0, 0, 9, 1]]))
    context = make_context(batch, is_causal=True, rotary_function=None)
    assert context.positions[0][mask[0].bool()].tolist() == [0, 0, 1]
    assert context.documents[0][mask[0].bool()].tolist() == [0, 1, 1]
    assert context.documents[1][:4].tolist() == [0, 1, 2, 2]
    assert [rows.size for rows in context.rows] == [2]
    moved = context.to("cpu")
    assert torch.equal(moved.positions, context.positions) and moved.rows[0].context is moved
