"""Files of the toolkit: every documented key has a fate, defaults are made explicit, and what comes out trains."""

import json

import pytest

from frankenstein_hf import recipes
from frankenstein_hf.commands.app import status_of
from frankenstein_hf.recipes import load, problems
from frankenstein_hf.recipes.importing import FATES, import_toolkit
from frankenstein_hf.recipes.reading import Document, written

from ..scripts.conftest import _own_caches, text  # noqa: F401

ATTENTION = """ode.solver=rk4 ode.steps=2 retnet.heads=4 mla.latent_rank=8 gqla.latent_rank=8 gqla.num_groups=2
gqla.decode_path=gqa mlra.latent_rank=8 mlra.num_latent_heads=4 tucker.query_rank=8 tucker.key_rank=8
tucker.value_rank=8 kpa.h1=2 kpa.h2=2 kpa.d1=8 kpa.d2=2 kpa.query_rank=6 kpa.key_rank=2 kpa.value_rank=2
tpa.query_rank=8 tpa.key_rank=2 tpa.value_rank=2 mfa.factor_rank=16 mfa.key_reuse=false
iha.num_pseudo_heads=4 gta.num_shared_groups=2 gta.value_latent_rank=8 mtla.latent_rank=8
mtla.merge_factor=2 mtla.stride=2 cca.latent_rank=8 cca.num_conv_layers=2 cca.conv_kernel_seq=4
cca.conv_kernel_ch=3 cca.qk_mean=true cca.value_shift=true ccgqa.query_latent_rank=8
ccgqa.kv_latent_rank=4 ccgqa.num_kv_heads=2 ccgqa.num_conv_layers=2 ccgqa.conv_kernel_seq=4
ccgqa.conv_kernel_ch=3 ccgqa.qk_mean=true ccgqa.value_shift=true msa.block_size=128 msa.topk_blocks=16
msa.index_dim=64 msa.kl_loss_weight=0.0 sparda.block_size=128 sparda.topk_blocks=16
sparda.forecast_dim=64 lsa.num_long_range=2048 lsa.num_buckets=512 lsa.num_sinks=4 lsa.pool_size=4
lsa.cluster_block=512 lsa.keys_per_bucket=8 lsa.max_keys_per_bucket=16 fastconformer.window_size=256
fastconformer.global_tokens=1 fastconformer.global_tokens_spacing=1
fastconformer.global_attn_separate=false engram.max_ngram_size=3 engram.n_heads_per_ngram=2
engram.embed_dim_per_head=8 engram.kernel_size=4 engram.seed=0 falcon.chunk_size=64"""
MODEL = """dims.mode=encoder dims.vocab_size=300 dims.hidden_size=32 dims.num_layers=4 dims.num_loops=1
dims.num_heads=4 dims.dropout=0.1 norm.type=prms_norm norm.partial_ratio=0.25
embedding.factorized.enabled=true embedding.factorized.dim=8 embedding.conv.enabled=false
embedding.conv.kernel=3 mhc.enabled=true mhc.expansion_rate=4 mhc.sinkhorn_iters=20 mhc.gating_init=0.01
mhc.checkpoint=false mhc.full_prec_under_bitnet=true moe.enabled=false moe.num_experts=8 moe.top_k=2
bitnet.enabled=false bitnet.routers=false bitnet.conv=false mixture_of_depths.enabled=false
mixture_of_depths.capacity_ratio=0.5 mixture_of_depths.router_aux_loss_weight=0.0 ssmax.enabled=false
ssmax.s_init=1.0 numerics.fixed_softmax=false numerics.fixed_cross_entropy=false ffn.hidden_size=64
ffn.activation=prelu classification_head.enabled=false classification_head.num_labels=2
classification_head.pooling_mode=cls"""
TRAINING = """task=mlm num_epochs=1 batch_size=2 dataloader_workers=0 max_length=16 mlm_probability=0.2 max_samples=40
test_percentage=20 dataset_batch_size=100 num_workers=1 cache_dir=cache local_parquet_dir=folder
prefer_local_cache=true stream_local_parquet=true join_temp_data_context_window=16
join_temp_data_min_remainder_tokens=8 use_amp=true gradient_accumulation_steps=1 scheduler_total_steps=2
scheduler_warmup_ratio=0.1 scheduler_type=linear_warmup_then_constant grad_clip_max_norm=0
inf_post_clip_threshold=1.0 max_nan_retries=3 checkpoint_every_n_steps=2 max_rolling_checkpoints=2
num_best_checkpoints=3 nan_check_interval=1 log_gradient_stats=true gradient_log_interval=10
csv_log_path=log.csv csv_rotate_on_schema_change=true gpu_metrics_backend=none nvml_device_index=0
enable_block_grad_norms=true telemetry_log_interval=10 gpu_temp_guard_enabled=false
switch_on_thermal=false gpu_temp_pause_threshold_c=80.0 gpu_temp_resume_threshold_c=70.0
gpu_temp_critical_threshold_c=90.0 gpu_temp_poll_interval_seconds=5.0 use_galore=false galore_rank=8
galore_update_interval=50 galore_scale=0.25 galore_max_dim=4096 hf_output_dir=out seed=3"""
TOKENIZER = """source=train_from_dataset use_fast=true training.algorithm=bpe training.vocab_size=300
training.pre_tokenizer=bytelevel training.lowercase=false training.strip_accents=false training.max_token_length=0
training.save_dir=tok"""
SUFFIXES = {
    "sgd_momentum": "momentum=0.9 nesterov=true",
    "adafactor": "beta2_decay=-0.8 clip_threshold=1.0 eps1=1e-30 eps2=1e-3",
    "galore_adamw": "rank=8 update_proj_gap=50",
    "prodigy": "d_coef=1.0",
    "sophia": "rho=0.04 update_k=10",
    "muon": "momentum=0.95 nesterov=true ns_steps=5 ns_eps=1e-7",
    "turbo_muon": "momentum=0.95 nesterov=true ns_steps=4 ns_eps=1e-7",
    "cautious_adamw": "cautious_clip=0.1",
    "anon": "gamma=0.5",
    "apollo": "rank=8 update_proj_gap=50 scale=1.0 scale_type=channel proj_type=std scale_front=false disable_nl=false",
    "apollo_mini": "update_proj_gap=50 scale=1.0 proj_type=std scale_front=false disable_nl=false",
    "q_apollo": "rank=8 update_proj_gap=50 quant_bits=8",
}
PLAIN = "adamw lion radam adan adopt ademamix mars_adamw lamb schedulefree_adamw shampoo soap"
SUFFIXES |= dict.fromkeys(PLAIN.split(), "")
GROUPS = "lr_embeddings=1e-6 lr_norms=1e-6 lr_attention=2e-6 lr_other=3e-6 wd_embeddings=0.01 wd_other=0.02"
PATTERN = ["standard", "retnet_attn", "standard", "retnet_attn"]


def nested(pairs, base=None):
    found = base if base is not None else {}
    for pair in pairs.split():
        way, _, value = pair.partition("=")
        place = found
        *names, last = way.split(".")
        for name in names:
            place = place.setdefault(name, {})
        try:
            place[last] = json.loads(value)
        except ValueError:
            place[last] = value
    return found


def toolkit(name="adamw", **changes):
    model = nested(MODEL)
    model["dims"]["layer_pattern"] = PATTERN
    model["attention"] = nested(ATTENTION)
    model["ffn"]["activation_config"] = {"prelu_init": 0.25, "gelu_x": 1}
    training = nested(TRAINING)
    parameters = {f"{name}-{pair.partition('=')[0]}": json.loads(pair.partition("=")[2]) for pair in GROUPS.split()}
    for key, value in nested(SUFFIXES[name]).items():
        parameters[f"{name}-{key}"] = value
    training["optimizer"] = {"optimizer_class": name, "parameters": parameters}
    made = {"model_class": "frankenstein_text_encoder", "model": model, "training": training}
    return made | {"tokenizer": nested(TOKENIZER), "text_dataset": {"streaming": False}} | changes


def leaves(values, way=""):
    if isinstance(values, dict):
        for key, value in values.items():
            yield from leaves(value, f"{way}.{key}" if way else key)
    else:
        yield way


def test_every_documented_key_has_one_row_and_one_that_knows_it():
    values = toolkit()
    found = import_toolkit(json.dumps(values), "old.json")  # the one-line JSON of the dashAI plugin is the same
    keys = [row.key for row in found.rows]
    assert sorted(keys) == sorted(leaves(values))
    assert {row.fate for row in found.rows} <= set(FATES)
    assert not [row for row in found.rows if "no version of the toolkit" in row.note]
    assert [row.key for row in found.lost] == ["model.embedding.factorized.enabled", "model.embedding.factorized.dim"]
    assert problems(Document(found.recipe)) == []
    assert found.recipe["model"]["layer_pattern"] == ["standard", "retnet"]
    assert found.recipe["training"]["max_grad_norm"] == 0
    assert found.recipe["training"]["lr_scheduler_type"] == "constant_with_warmup"
    assert found.recipe["optimizer"]["groups"]["attention"]["lr"] == 2e-6
    assert import_toolkit(written(values), "old.yaml").recipe == found.recipe


@pytest.mark.parametrize("name", SUFFIXES)
def test_every_optimizer_brings_its_parameters(name):
    found = import_toolkit(json.dumps(toolkit(name)), "old.json")
    lost = [row for row in found.lost if "embedding" not in row.key]
    # some methods have no rate or decay of their own for a group, and say so
    assert all("groups" in row.note for row in lost), lost
    assert found.recipe["optimizer"]["name"] == name
    assert problems(Document(found.recipe)) == []


def test_what_is_absent_there_is_on_and_is_said():
    least = {
        "model_class": "frankenstein_text_decoder",
        "model": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "layer_pattern": ["mamba"] * 2,
        },
        "training": {
            "task": "causal_lm",
            "optimizer": {"optimizer_class": "lion", "parameters": {"adamw-lr_other": 1}},
        },
    }  # flat, as in version 1.0
    least["model"]["layer_pattern"] = ["mamba", "mamba"]
    least["training"]["optimizer"]["parameters"] = {"adamw-lr_other": 1}
    found = import_toolkit(json.dumps(least), "old.json")
    fates = {row.key: row for row in found.rows}
    assert found.recipe["model"]["norm"] == "dynamic_tanh" and fates["model.norm.type"].fate == "explicit"
    assert found.recipe["model"]["intermediate_size"] == 64 and fates["model.ffn.hidden_size"].fate == "explicit"
    assert found.recipe["model"]["feed_forward"] == "plain" and found.recipe["task"] == "causal_lm"
    for key in ("model.moe.enabled", "model.bitnet.enabled"):
        assert fates[key].fate == "impossible" and "the toolkit's default" in fates[key].note
    assert "weights do not carry over" in fates["model.dims.layer_pattern"].note
    assert fates["training.optimizer.parameters.adamw-lr_other"].fate == "impossible"
    with pytest.raises(ValueError, match="is no file of the toolkit"):
        import_toolkit("a: 1", "x")


def test_the_command_writes_what_trains_and_refuses_to_lose_something(tmp_path, text, capsys):  # noqa: F811
    values = toolkit()
    values["model"]["attention"] = {}
    values["model"]["dims"]["layer_pattern"] = ["standard", "gla", "standard", "gla"]
    values["training"] = {key: own for key, own in values["training"].items() if key != "local_parquet_dir"}
    file = tmp_path / "old.yaml"
    file.write_text(written(values))
    assert status_of(["import", str(file)]) == 3 and not (tmp_path / "old.recipe.yaml").exists()
    assert "model.embedding.factorized.enabled" in capsys.readouterr().err
    assert status_of(["import", str(file), "--allow-loss"]) == 0
    assert "impossible model.embedding.factorized.enabled: True" in capsys.readouterr().out
    assert status_of(["import", str(file), "--allow-loss"]) == 3  # it is there already
    metrics = recipes.run(
        load(tmp_path / "old.recipe.yaml", [f"data.train_file={text}", f"training.output_dir={tmp_path / 'out'}"])
    )
    assert metrics["train"]["steps"] == 2 and metrics["model"]["layers"] == ["standard", "gla"] * 2
