"""What a transformers user expects of the models, whatever the mixers."""

import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import frankenstein_hf as fhf
from frankenstein_hf.modeling.hub_bundle import HEADS

from ..tiny import CAUSAL, VOCAB, assert_near, tiny_config, tiny_model, tokens

PATTERN = ["gated_deltanet", "swa", "standard"]


def test_auto_classes_build_and_load_every_head(tmp_path):
    config = tiny_config(PATTERN)
    for auto_name, place in HEADS.items():
        own = getattr(fhf, place.partition(".")[2])
        assert type(getattr(transformers, auto_name).from_config(config)) is own
    model, x = tiny_model(PATTERN), tokens(1, 6)
    model.save_pretrained(tmp_path, save_code=False)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.is_causal and config.is_causal is None
    assert torch.equal(loaded(x).last_hidden_state, model.model(x).last_hidden_state)


def test_nobody_writes_into_the_callers_config(tmp_path):
    config = tiny_config(PATTERN)
    before = config.to_dict()
    for model_class in (fhf.FrankensteinForCausalLM, fhf.FrankensteinForMaskedLM, fhf.FrankensteinModel):
        model = model_class(config).train()
        out = model(tokens(1, 5))
        out[0].sum().backward()
        model.save_pretrained(tmp_path / model_class.__name__, save_code=False)
    assert config.to_dict() == before
    assert fhf.FrankensteinConfig.from_pretrained(tmp_path / "FrankensteinForCausalLM").is_causal is True
    assert fhf.FrankensteinConfig.from_pretrained(tmp_path / "FrankensteinForMaskedLM").is_causal is False


def test_a_masked_lm_on_a_causal_checkpoint_stays_causal_and_says_so(tmp_path, caplog):
    tiny_model("standard").save_pretrained(tmp_path, save_code=False)
    with caplog.at_level("WARNING"):
        model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert model.is_causal and model.model.is_causal
    assert not AutoModelForMaskedLM.from_pretrained(tmp_path, is_causal=False).model.is_causal


def test_hidden_states_attentions_and_tuples():
    model, x = tiny_model(PATTERN, attn_implementation="eager"), tokens(2, 7)
    out = model(x, output_hidden_states=True, output_attentions=True)
    assert [h.shape for h in out.hidden_states] == [(2, 7, 20)] * 4
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert out.attentions[0] is None
    for weights in out.attentions[1:]:
        assert weights.shape == (2, 2, 7, 7)
        assert_near(weights.sum(-1), torch.ones(2, 2, 7))
        assert (weights.triu(1) == 0).all()
    as_tuple = model(x, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], out.logits)
    with pytest.raises(ValueError, match=r"attn_implementation='eager'"):
        tiny_model(PATTERN)(x, output_attentions=True)


def test_attentions_of_padded_and_packed_rows_stand_where_the_tokens_stand():
    model = tiny_model(["swa", "standard"], attn_implementation="eager")
    x, mask = tokens(1, 7), torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    for arguments in ({"attention_mask": mask}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}):
        windowed, dense = model(x, output_attentions=True, **arguments).attentions
        real = mask[0].bool() if "attention_mask" in arguments else torch.ones(7, dtype=torch.bool)
        visible = (windowed > 0)[0, 0][real][:, real]
        expected = (dense > 0)[0, 0][real][:, real]
        assert torch.equal(visible, expected)  # five tokens, or documents of three and four, fit into the window


def test_logits_to_keep_inputs_embeds_and_token_type_ids():
    model, x = tiny_model(PATTERN), tokens(2, 8)
    full = model(x).logits
    assert_near(model(x, logits_to_keep=3).logits, full[:, -3:])
    assert_near(model(x, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(x)).logits, full)
    assert torch.equal(model(x, token_type_ids=torch.zeros_like(x)).logits, full)


def test_cache_and_past_key_values_name_the_same_thing():
    model, x = tiny_model(PATTERN), tokens(1, 8)
    first = model(x[:, :5])
    assert first.past_key_values is first.cache
    expected = model(x).logits[:, 5:]
    for key in ("cache", "past_key_values"):
        cache = model(x[:, :5]).cache
        assert_near(model(x[:, 5:], **{key: cache}).logits, expected)
    assert model(x, use_cache=False).cache is None
    plain = DynamicCache()  # built without a config: filled at first use
    model(x[:, :5], cache=plain)
    assert_near(model(x[:, 5:], cache=plain).logits, expected)


def test_standard_layers_equal_llama():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=20, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=10, rms_norm_eps=1e-6,
    )  # fmt: skip
    ropes = (
        None,
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    for rope in ropes:
        config.rope_parameters = rope or {"rope_type": "default", "rope_theta": 1e4}
        config.max_position_embeddings = 16
        torch.manual_seed(0)
        theirs = LlamaForCausalLM(config).eval()
        ours = tiny_model(["standard"] * 2, tie_word_embeddings=False, rope_parameters=rope, max_position_embeddings=16)
        ours.load_state_dict(
            {
                key.replace("self_attn", "mixer").replace("post_attention_layernorm", "post_mixer_layernorm"): value
                for key, value in theirs.state_dict().items()
            }
        )
        x = tokens(2, 30)
        assert_near(ours(x, labels=x).loss, theirs(x, labels=x).loss)
        assert_near(ours(x).logits, theirs(x).logits)


@pytest.mark.parametrize("choice", [{"norm": "layer_norm"}, {"feed_forward": "plain", "hidden_act": "gelu"},
                                    {"attention_bias": True, "mlp_bias": True}])  # fmt: skip
def test_other_norms_and_feed_forwards_train_and_reload(choice, tmp_path):
    model, x = tiny_model(PATTERN, **choice).train(), tokens(2, 9)
    model(x, labels=x).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path, save_code=False)
    assert torch.equal(type(model).from_pretrained(tmp_path)(x).logits, model.eval()(x).logits)


def test_dropout_is_random_in_training_and_off_otherwise():
    model, x = tiny_model(PATTERN, hidden_dropout=0.3, attention_dropout=0.3), tokens(2, 9)
    assert torch.equal(model(x).logits, model(x).logits)
    model.train()
    assert not torch.equal(model(x).logits, model(x).logits)
    for pattern in ("standard", "swa"):  # attention dropout on its own
        model = tiny_model(pattern, attention_dropout=0.3).train()
        assert not torch.equal(model(x).logits, model(x).logits)


# ---------------------------------------------------------------------- losses


def test_losses_are_the_textbook_ones():
    x = tokens(2, 9)
    labels = x.masked_fill(torch.rand(2, 9) < 0.4, -100)
    causal = tiny_model(PATTERN)
    out = causal(x, labels=labels)
    expected = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_near(out.loss, expected)
    masked = tiny_model(PATTERN, is_causal=False)
    out = masked(x, labels=labels)
    assert_near(out.loss, nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    total = (labels != -100).sum()
    assert_near(masked(x, labels=labels, num_items_in_batch=2 * total).loss, out.loss / 2)


def test_sparse_prediction_changes_neither_loss_nor_gradient():
    x, labels = tokens(2, 9), tokens(2, 9, seed=4).masked_fill(torch.rand(2, 9) < 0.6, -100)
    gradients = []
    for sparse in (False, True):
        model = tiny_model(PATTERN, is_causal=False, sparse_prediction=sparse).train()
        out = model(x, labels=labels, num_items_in_batch=torch.tensor(5))
        out.loss.backward()
        gradients.append([out.loss, *(p.grad for p in model.parameters())])
        assert out.logits.shape == ((int((labels != -100).sum()), VOCAB) if sparse else (2, 9, VOCAB))
        assert model.eval()(x, labels=labels).logits.shape == (2, 9, VOCAB)
    for dense, sparse in zip(*gradients):
        assert_near(sparse, dense)


def test_packed_documents_are_not_predicted_across_their_border():
    model = tiny_model(PATTERN)
    a, b = tokens(1, 6), tokens(1, 4, seed=2)
    positions = torch.tensor([[*range(6), *range(4)]])
    packed = torch.cat([a, b], dim=1)
    separate = (5 * model(a, labels=a).loss + 3 * model(b, labels=b).loss) / 8
    assert_near(model(packed, labels=packed, position_ids=positions).loss, separate)


def test_documents_of_very_different_lengths_do_not_blow_the_batch_up():
    model = tiny_model(["gla", "swa"])
    lengths = [40, *[1, 2, 3] * 5]
    documents = [tokens(1, n, seed=i) for i, n in enumerate(lengths)]
    positions = torch.tensor([[p for n in lengths for p in range(n)]])
    sizes = []
    hook = model.model.layers[0].mixer.register_forward_hook(
        lambda module, args, output: sizes.extend(rows.index.numel() for rows in args[1].rows)
    )
    packed = model(torch.cat(documents, dim=1), position_ids=positions).logits
    hook.remove()
    assert sum(sizes) <= 2 * sum(lengths) and len(sizes) > 1
    assert_near(packed, torch.cat([model(x).logits for x in documents], dim=1))


# ---------------------------------------------------------------------- masks


def test_a_4d_mask_is_honoured_by_dense_mixers_and_refused_by_others():
    x = tokens(2, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[:, 2] = False
    allowed[2, 2] = True
    for pattern in (["standard", "gqa", "memory"],):
        for backend in ("eager", "sdpa"):
            model = tiny_model(pattern, attn_implementation=backend)
            boolean = model(x, attention_mask=allowed[None, None]).logits
            additive = torch.zeros(6, 6).masked_fill(~allowed, torch.finfo(torch.float32).min)
            assert_near(model(x, attention_mask=additive.expand(2, 1, 6, 6)).logits, boolean)
            dropped = torch.cat([x[:, :2], x[:, 3:]], dim=1)  # token 2 is seen by nobody
            positions = torch.tensor([[0, 1, 3, 4, 5]])
            tril = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
            without = model(dropped, attention_mask=tril, position_ids=positions).logits
            assert_near(boolean[:, [0, 1, 3, 4, 5]], without)
    with pytest.raises(ValueError, match="4-D attention_mask cannot be honoured by gated_deltanet, swa"):
        tiny_model(PATTERN)(x, attention_mask=allowed[None, None])


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_tying_saving_loading_and_resizing_agree(tie, is_causal, tmp_path):
    model = tiny_model(["memory", "standard", "memory"], is_causal, tie_word_embeddings=tie,
                       mixer_params={"memory": {"tie_tables": True}})  # fmt: skip
    for resized in (False, True):
        if resized:
            model.resize_token_embeddings(VOCAB + 6)
        tables = [model.model.layers[i].mixer.token_memory.weight for i in (0, 2)]
        assert tables[0] is tables[1]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
        model.save_pretrained(tmp_path / str(resized), save_code=False)
        loaded = type(model).from_pretrained(tmp_path / str(resized))
        assert loaded.model.layers[0].mixer.token_memory.weight is loaded.model.layers[2].mixer.token_memory.weight
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
        assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters()))
        assert loaded.config.vocab_size == model.lm_head.out_features


def test_meta_initialisation_reproduces_every_parameter_kind(tmp_path):
    """A head loaded onto a base checkpoint initialises only what is new, and leaves nothing unfilled."""
    base = fhf.FrankensteinModel(tiny_config(["mamba", "gla", "gated_deltanet", "memory"]))
    base.save_pretrained(tmp_path, save_code=False)
    model = fhf.FrankensteinForMaskedLM.from_pretrained(tmp_path)
    for key, value in base.state_dict().items():
        assert torch.equal(model.model.state_dict()[key], value), key
    assert all(p.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------- Trainer


class Rows(torch.utils.data.Dataset):
    def __init__(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        self.x, self.labels = x, x if labels is None else labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.x[i], "labels": self.labels[i]}


def train(model, rows, path, **arguments) -> Trainer:
    values = dict(
        output_dir=str(path), per_device_train_batch_size=2, max_steps=4, report_to=[], disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2, use_cpu=True, logging_steps=1, dataloader_drop_last=False,
    )  # fmt: skip
    trainer = Trainer(model, TrainingArguments(**values | arguments), train_dataset=rows)
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    return trainer


@pytest.mark.parametrize("is_causal", [True, False])
def test_four_accumulation_steps_equal_one_large_batch(is_causal, tmp_path):
    x = tokens(16, 9)
    labels = x.clone()
    for i in range(16):
        labels[i, : i // 2] = -100  # rows of different weight
    models = []
    for size, steps in ((8, 1), (2, 4)):
        models.append(tiny_model(PATTERN, is_causal, sparse_prediction=True).train())
        train(models[-1], Rows(x, labels), tmp_path, per_device_train_batch_size=size,
              gradient_accumulation_steps=steps, max_steps=2, optim="sgd")  # fmt: skip
    for p, q in zip(*(model.parameters() for model in models)):
        assert_near(p, q, rtol=1e-4, atol=1e-6)


def test_interrupted_training_resumes_exactly(tmp_path):
    x = tokens(8, 9)
    whole = tiny_model(PATTERN).train()
    train(whole, Rows(x), tmp_path / "whole")
    half = tiny_model(PATTERN).train()
    train(half, Rows(x), tmp_path / "half", save_strategy="steps", save_steps=2)
    resumed = tiny_model(PATTERN, seed=9).train()
    train(resumed, Rows(x), tmp_path / "half", resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters()))


# ---------------------------------------------------------------------- a fresh process

FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
import frankenstein_hf
assert not {"modeling", "configuration"} & set(sys.modules), "the links at the repository root leaked into sys.modules"
x = torch.load(sys.argv[1] + "/x.pt")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
torch.save(model(x).logits, sys.argv[1] + "/logits.pt")
"""


def test_logits_are_bit_equal_in_a_fresh_process(tmp_path):
    model, x = tiny_model(CAUSAL), tokens(2, 21)
    model.save_pretrained(tmp_path, save_code=False)
    torch.save(x, tmp_path / "x.pt")
    fresh = "import torch; torch.set_num_threads(1)\n" + FRESH
    subprocess.run([sys.executable, "-c", fresh, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(x).logits)
