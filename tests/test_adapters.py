"""PEFT with every mixer and head: default targets, merging, saving, and a warning where mixers are left out."""

import copy
import logging

import pytest
import torch
from torch import nn

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.hub_bundle import HEADS

from .heads import head_batch, head_model
from .tiny import ALL_MIXERS, assert_near, tiny_model, tokens

peft = pytest.importorskip("peft")

TASKS = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}  # the others have no task type in PEFT


def adapted(model: nn.Module, **changes) -> nn.Module:
    """`model` with random (not zero) LoRA weights."""
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **changes))


def projections(model: nn.Module) -> list[str]:
    """Names of the mixers' projections within their mixer."""
    return sorted(
        {k.partition(".mixer.")[2] for k, m in model.named_modules() if ".mixer." in k and type(m) is nn.Linear}
    )


@pytest.mark.parametrize("how", ["lora", "dora", "named"])
@pytest.mark.parametrize("name", ALL_MIXERS)
def test_adapters_train_merge_and_reload(name, how, tmp_path):
    base, x = tiny_model(name, MIXERS.get(name).causal), tokens(2, 9)
    for p in base.parameters():  # behind a gate that is closed at first nothing learns until the gate has
        if not p.any():
            nn.init.normal_(p, std=0.3)
    targets = projections(base)[-2:] if how == "named" else "all-linear"
    model = adapted(copy.deepcopy(base), target_modules=targets, use_dora=how == "dora")
    model.train()(input_ids=x, labels=x).loss.backward()  # training: auxiliary losses count
    model.eval()
    trainable = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in key for key in trainable)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    with torch.no_grad():
        logits = model(input_ids=x).logits
        assert not torch.allclose(logits, base(x).logits, rtol=1e-3)
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        assert torch.equal(loaded(input_ids=x).logits, logits)
        # in double precision: some stacks amplify the rounding of a merge
        logits = model.double()(input_ids=x).logits
        merged = model.merge_and_unload()
        assert type(merged) is type(base) and merged.state_dict().keys() == base.state_dict().keys()
        assert_near(merged(x).logits, logits, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2),
        peft.AdaLoraConfig(total_step=9),
        peft.IA3Config(),
        peft.LNTuningConfig(),
        peft.LoHaConfig(r=2),
        peft.VeraConfig(r=2),
        peft.OFTConfig(r=1, oft_block_size=0),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_every_kind_of_adapter_has_default_targets_in_every_layer(config, caplog):
    config = copy.deepcopy(config)
    assert config.target_modules is None
    with caplog.at_level(logging.WARNING):
        model = peft.get_peft_model(tiny_model(["gla", "mamba", "swa"]), config)
    assert "touches no projection" not in caplog.text
    x = tokens(1, 6)
    model(input_ids=x, labels=x).loss.backward()
    trained = [key for key, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    for layer in range(3):
        assert any(f"layers.{layer}." in key for key in trained) or config.peft_type == "VERA"  # which shares matrices
        assert any(f"layers.{layer}." in key for key in model.base_model.targeted_module_names)


def test_a_mixer_from_outside_is_reached_by_default():
    """The names are read off the registry when they are needed, not when PEFT was imported."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    names = set(TABLE["frankenstein"])
    for name in ALL_MIXERS:
        assert {f"mixer.{last}" for last in projections(tiny_model(name, MIXERS.get(name).causal))} <= names
    assert not any("mlp" in name or "lm_head" in name for name in names)


def test_mixers_left_without_an_adapter_are_named_once(caplog):
    logger = "frankenstein_hf.adapters"
    with caplog.at_level(logging.WARNING, logger):
        adapted(tiny_model(["gla", "mamba", "swa", "mamba"]), target_modules=["q_proj"])
        adapted(tiny_model(["gla", "mamba", "swa", "mamba"]), target_modules=["q_proj"])
    (message,) = [record.getMessage() for record in caplog.records if record.name == logger]
    assert "'mamba' (layers 1, 3)" in message and "'gla'" not in message and "'swa'" not in message


def test_nothing_is_said_where_nothing_is_missing(caplog, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    pattern = ["retnet", "mamba"]
    with caplog.at_level(logging.WARNING):
        adapted(tiny_model(pattern))
        adapted(tiny_model(pattern), layers_to_transform=[0], target_modules=["q_proj"])  # only layer 0 was meant
        adapted(LlamaForCausalLM(LlamaConfig(**size)), target_modules=["up_proj"])  # another family
        assert "touches no projection" not in caplog.text
        partial = adapted(tiny_model(pattern), target_modules=["v_proj"])
        caplog.clear()
        partial.save_pretrained(tmp_path)
        peft.PeftModel.from_pretrained(tiny_model(pattern), tmp_path)  # for use, not for training
    assert "touches no projection" not in caplog.text


@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize("auto_name", HEADS)
def test_heads_train_and_travel_with_the_adapter(auto_name, targets, tmp_path):
    model, batch = head_model(auto_name, ["gated_deltanet", "swa"]), head_batch(auto_name, 4, 8)
    own = {key for key, _ in model.named_parameters() if auto_name != "AutoModel" and not key.startswith("model.")}
    own -= {"lm_head.weight"}
    modules = None if auto_name in TASKS else sorted({key.partition(".")[0] for key in own}) or None
    changes = dict(target_modules=targets, task_type=TASKS.get(auto_name), modules_to_save=modules)
    wrapped = adapted(copy.deepcopy(model), **changes)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    output = wrapped(**batch)
    loss = output.loss if auto_name != "AutoModel" else output.last_hidden_state.square().mean()
    loss.backward()
    optimizer.step()
    trained = {key for key, p in wrapped.named_parameters() if p.requires_grad and p.grad is not None}
    assert any("mixer" in key for key in trained) and any("mlp" in key for key in trained) == (targets is not None)
    for key in own:
        module, _, last = key.rpartition(".")
        assert any(name.endswith(f"{module}.modules_to_save.default.{last}") for name in trained), key
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch)[0], wrapped.eval()(**batch)[0])


def test_prompt_tuning_works_and_prefix_tuning_says_why_it_does_not():
    x = tokens(2, 7)
    call = dict(input_ids=x, attention_mask=torch.ones_like(x))
    base = tiny_model(["gla", "standard"])
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(copy.deepcopy(base), prompts)
    model(**call, labels=x).loss.backward()
    assert model.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0
    embeds = torch.cat([model.get_prompt(2), base.get_input_embeddings()(x)], dim=1)
    assert_near(model(**call).logits, base(inputs_embeds=embeds).logits)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="Prefix tuning, which brings keys and values of its own"):
        peft.get_peft_model(copy.deepcopy(base), prefix)(**call)
