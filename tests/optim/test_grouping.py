"""Who belongs to which group, for every mixer and for modules of other kinds."""

import contextlib

import pytest
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.grouping import classify
from frankenstein_hf.optim.matrices import LAYOUTS, as_matrices, by_shape, from_matrices, matrix_shape

from ..tiny import ALL_MIXERS, CAUSAL, tiny_model


def kinds(model):
    return {info.name: (info.role, info.kind) for info in classify(model)}


@pytest.mark.parametrize("name", ALL_MIXERS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_every_mixer_is_in_one_group(name, tied):
    model = tiny_model([name, name], name in CAUSAL, tie_word_embeddings=tied)
    infos = classify(model)
    assert sorted(id(i.parameter) for i in infos) == sorted(id(p) for p in model.parameters())
    modules = dict(model.named_modules())
    for info in infos:
        owner = modules[info.name.rpartition(".")[0]]
        if isinstance(owner, nn.Embedding) or info.name == "lm_head.weight":
            expected = ("embeddings", "table")
        elif "Norm" in type(owner).__name__ or info.parameter.dim() < 2 or type(owner).__name__ == "ShortConvolution":
            expected = ("norms", "vector")
        elif isinstance(owner, nn.Linear):
            expected = ("attention" if ".mixer." in info.name else "other", "matrix")
        else:
            # a mixer's own tensors: decays, gates, means and slots, unless it says otherwise
            declared = getattr(owner, "optimizer_kinds", {}).get(info.name.rpartition(".")[2])
            expected = ("attention", "matrix") if declared == "matrix" else ("norms", "vector")
        assert (info.role, info.kind) == expected, info.name
    for group in fhf.create_optimizer(model, "adamw", weight_decay=0.1).param_groups:
        assert group["weight_decay"] == (0.1 if group["role"] in ("attention", "other") else 0.0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(3, 4, 5))
        self.bias = nn.Parameter(torch.zeros(3, 1, 5))
        self.slots = nn.Parameter(torch.zeros(2, 3, 4))
        self.w = nn.Parameter(torch.zeros(6, 4))

    optimizer_kinds = {"slots": "vector", "w": "matrix"}  # noqa: RUF012


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3)
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.norm = nn.GroupNorm(2, 6)
        self.self_attn = nn.MultiheadAttention(4, 2)
        self.experts = Experts()
        self.out = nn.Linear(4, 7)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.out.weight = self.embed.weight


def test_convolutions_experts_and_declared_tensors():
    assert kinds(Zoo()) == {
        "embed.weight": ("embeddings", "table"),
        "conv.weight": ("other", "matrix"),
        "conv.bias": ("norms", "vector"),
        "depthwise.weight": ("norms", "vector"),
        "depthwise.bias": ("norms", "vector"),
        "norm.weight": ("norms", "vector"),
        "norm.bias": ("norms", "vector"),
        "self_attn.in_proj_weight": ("attention", "matrix"),
        "self_attn.in_proj_bias": ("norms", "vector"),
        "self_attn.out_proj.weight": ("attention", "matrix"),
        "self_attn.out_proj.bias": ("norms", "vector"),
        "experts.up_proj": ("other", "matrix"),
        "experts.bias": ("norms", "vector"),
        "experts.slots": ("norms", "vector"),
        "experts.w": ("other", "matrix"),
        "out.bias": ("norms", "vector"),
    }


def test_parameters_as_matrices():
    assert matrix_shape((6, 4, 3), "flatten") == (1, 6, 12)
    assert matrix_shape((2, 5, 6, 4)) == (10, 6, 4)
    conv = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(as_matrices(conv, "flatten")[0], conv.view(2, 12))
    assert by_shape([torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(5, 3, 4)]) == {(3, 4): [0, 2], (4, 3): [1]}
    with pytest.raises(ValueError, match="no matrix"):
        matrix_shape((3,))


def test_groups_get_their_own_settings():
    model = tiny_model(["swa"])
    groups = {
        "embeddings": {"lr": 0.5, "weight_decay": 0.1},
        "norms": {"betas": (0.5, 0.6)},
        "attention": {"eps": 1e-3},
    }
    optimizer = fhf.create_optimizer(model, "adamw", lr=0.25, groups=groups)
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert (by_role["embeddings"]["lr"], by_role["embeddings"]["weight_decay"]) == (0.5, 0.1)
    assert by_role["norms"]["betas"] == (0.5, 0.6) and by_role["other"]["betas"] == (0.9, 0.999)
    assert by_role["attention"]["eps"] == 1e-3 and by_role["attention"]["lr"] == 0.25
    with pytest.raises(ValueError, match=r"'sgd': group 'norms' cannot have its own 'betas'.*Allowed: lr, w"):
        fhf.create_optimizer(model, "sgd", groups={"norms": {"betas": (0.1, 0.1)}})


def test_describe_groups_prints_every_parameter(capsys):
    text = fhf.describe_groups(tiny_model(["swa", "swa"]), "adamw", lr=0.125)
    assert capsys.readouterr().out == text + "\n"
    assert "attention: adamw lr=0.125 weight_decay=0.01" in text
    assert "model.layers.*.mixer.q_proj.weight [20, 20] ×2" in text


def test_heads_of_other_models_are_tables():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12)
    found = kinds(BertForSequenceClassification(config))
    assert found["classifier.weight"] == ("embeddings", "table")
    assert found["bert.encoder.layer.0.attention.self.query.weight"] == ("attention", "matrix")
    assert found["bert.encoder.layer.0.intermediate.dense.weight"] == ("other", "matrix")
    assert found["bert.embeddings.LayerNorm.weight"] == ("norms", "vector")


@pytest.mark.parametrize(
    ("name", "hidden", "heads"),
    [
        ("BertForMaskedLM", ["cls.predictions.transform.dense.weight"], ["cls.predictions.decoder.weight"]),
        ("BertForPreTraining", ["cls.predictions.transform.dense.weight"], ["cls.seq_relationship.weight"]),
        ("RobertaForSequenceClassification", ["classifier.dense.weight"], ["classifier.out_proj.weight"]),
        ("RobertaForMaskedLM", ["lm_head.dense.weight"], ["lm_head.decoder.weight"]),
    ],
)
def test_hidden_layers_of_heads_are_matrices(name, hidden, heads):
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        tie_word_embeddings=False,
    )  # fmt: skip
    found = kinds(cls(config))
    assert [found[key] for key in hidden] == [("other", "matrix")] * len(hidden)
    assert [found[key] for key in heads] == [("embeddings", "table")] * len(heads)


@pytest.mark.parametrize("how", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_weight_norm_splits_a_weight_into_one_of_its_kind_and_a_vector(how):
    with pytest.warns(FutureWarning) if how is nn.utils.weight_norm else contextlib.nullcontext():
        layers = nn.ModuleDict(
            {"conv": how(nn.Conv1d(4, 6, 3)), "one": how(nn.Linear(1, 5)), "wide": how(nn.Linear(4, 5))}
        )
    found = {info.name: (info.kind, info.layout) for info in classify(layers)}
    assert sorted(found.values()) == sorted(
        [("vector", "stack")] * 6 + [("matrix", "stack")] * 2 + [("matrix", "flatten")]
    )
    assert all((kind == "matrix") == key.endswith(("original1", "weight_v")) for key, (kind, _) in found.items())


def test_a_parametrized_table_stays_one():
    table = nn.utils.parametrizations.spectral_norm(nn.Embedding(5, 4))
    assert [info.kind for info in classify(table)] == ["table"]


def test_gpt2s_layers_are_transposed():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    layouts = {info.name: info.layout for info in classify(model) if info.kind == "matrix"}
    assert set(layouts.values()) == {"transpose"} and len(layouts) == 4
    assert matrix_shape((3, 4, 6), "transpose") == (3, 6, 4)
    x = torch.randn(3, 4, 6)
    for layout in LAYOUTS:
        assert torch.equal(from_matrices(as_matrices(x, layout), x.shape, layout), x)


def test_a_mixer_of_any_class_name_is_one():
    """Roles inside our stacks come from the mixers' specs, not from what classes are called."""
    model = tiny_model(["swa"])
    mixer = model.model.layers[0].mixer
    mixer.__class__ = type("Blend", (nn.Module,), dict(type(mixer).__dict__))
    model.model.layers[0].mlp.__class__ = type("MixerLikeName", (nn.Module,), {})
    found = kinds(model)
    assert found["model.layers.0.mixer.q_proj.weight"] == ("attention", "matrix")
    assert found["model.layers.0.mlp.up_proj.weight"] == ("other", "matrix")
