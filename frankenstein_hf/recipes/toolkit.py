"""Keys of the Frankenstein Transformer toolkit, and what they are called here; `importing.py` reads by these tables."""

from typing import Any

# Keys whose value means the same here.
SAME = {
    "model.dims.hidden_size": "model.hidden_size",
    "model.dims.num_layers": "model.num_hidden_layers",
    "model.dims.num_heads": "model.num_attention_heads",
    "model.dims.num_kv_heads": "model.num_key_value_heads",
    "model.dims.num_loops": "model.num_loops",
    "model.dims.dropout": "model.hidden_dropout",
    "model.norm.type": "model.norm",
    "model.ffn.hidden_size": "model.intermediate_size",
    "training.num_epochs": "training.num_train_epochs",
    "training.batch_size": "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "training.dataloader_workers": "training.dataloader_num_workers",
    "training.seed": "training.seed",
    "training.grad_clip_max_norm": "training.max_grad_norm",
    "training.hf_output_dir": "training.output_dir",
    "training.max_length": "data.block_size",
    "training.mlm_probability": "objective.mask_rate",
    "training.max_samples": "data.max_train_samples",
    "training.scheduler_total_steps": "training.max_steps",
    "training.scheduler_warmup_ratio": "training.warmup_steps",
    "training.checkpoint_every_n_steps": "training.save_steps",
    "training.max_rolling_checkpoints": "training.save_total_limit",
    "training.join_temp_data_context_window": "data.block_size",
    "tokenizer.training.vocab_size": "tokenizer.train.vocab_size",
    "text_dataset.name": "data.dataset_name",
    "text_dataset.dataset_name": "data.dataset_name",
    "text_dataset.config": "data.dataset_config_name",
    "text_dataset.text_column": "data.text_column",
}
# What a training library does not decide, or what is always there.
DROPPED = {
    r"training\.(csv_\w+|log_gradient_stats|gradient_log_interval|enable_block_grad_norms|telemetry_\w+)": (
        "losses and rates are always in trainer_state.json and metrics.json"
    ),
    r"training\.(max_nan_retries|inf_post_clip_threshold|nan_check_interval)": (
        "the optimizer leaves out gradients that are not finite, and counts them"
    ),
    r"training\.(gpu_\w+|nvml_\w+|switch_on_thermal)": "the temperature of a machine is not its business",
    r"training\.(cache_dir|num_workers|dataset_batch_size|prefer_local_cache|stream_local_parquet)": (
        "`datasets` decides it"
    ),
    r"training\.join_temp_data_min_remainder_tokens": "the last row is padded and counts by its tokens",
    r"tokenizer\.(use_fast|training\.save_dir)": "tokenizers are always fast, and saved with the model",
    r"model\.(mhc\.checkpoint|mhc\.full_prec_under_bitnet)": "training.gradient_checkpointing is for the whole model",
    r"inference\..*": "settings of generate(): generation_config.json and arguments of the cache",
    r"training\.sbert\.(wandb_project|resume_from_checkpoint)": "training.report_to; runs go on by themselves",
}
# Functions with the same name that compute something else there.
OTHER_FUNCTIONS = {
    "mamba": "it is a linear map there",
    "titan": "it is plain attention there",
    "titan_attn": "it is plain attention there",
    "gla": "the gate is on the wrong axis there",
    "deltanet": "the delta is element-wise there",
}
# The toolkit's defaults that differ from ours, where the key is absent; () for a key that no file of ours can have.
DEFAULTS: dict[str, Any] = {
    "model.norm.type": "dynamic_tanh",
    "model.moe.enabled": True,
    "model.bitnet.enabled": True,
    "model.ffn.activation": "silu",
    "training.mlm_probability": 0.15,
}
# Blocks that are off unless `enabled`: what would be needed here.
SWITCHES = {
    "model.moe": "experts",
    "model.bitnet": "ternary weights",
    "model.mixture_of_depths": "mixture of depths",
    "model.ssmax": "scalable softmax",
    "model.embedding.factorized": "factorised embeddings",
    "model.embedding.conv": "convolution over embeddings",
}
OPTIMIZER_NAMES = {"ada_muon": "adamuon"}
GROUP_SUFFIXES = {"lr": "lr", "wd": "weight_decay", "betas": "betas", "eps": "eps"}
ROLES = ("embeddings", "norms", "attention", "other")
SUFFIXES = {"ns_eps": "eps", "clip_threshold": "d"}
SCHEDULERS = {"cosine": "cosine", "constant": "constant", "linear_warmup_then_constant": "constant_with_warmup"}
TASKS = {"mlm": "masked_lm", "causal_lm": "causal_lm", "sbert": "sentence_embedding"}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
SBERT = {
    "dataset_name": "data.dataset_name",
    "output_dir": "training.output_dir",
    "batch_size": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "grad_clip_max_norm": "training.max_grad_norm",
    "num_epochs": "training.num_train_epochs",
    "warmup_steps": "training.warmup_steps",
    "evaluation_steps": "training.eval_steps",
    "checkpoint_save_steps": "training.save_steps",
    "max_train_samples": "data.max_train_samples",
    "max_eval_samples": "data.max_eval_samples",
    "max_length": "data.block_size",
    "trust_remote_code": "model.trust_remote_code",
    "use_amp": "training.fp16",
}
# Flat keys of version 1.0, by where they are now.
FLAT = {
    **{
        name: f"dims.{name}"
        for name in ("mode", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
    },
    **{name: f"dims.{name}" for name in ("num_loops", "dropout", "layer_pattern")},
    "norm_type": "norm.type",
    "ffn_hidden_size": "ffn.hidden_size",
    "ffn_activation": "ffn.activation",
    "use_moe": "moe.enabled",
    "num_experts": "moe.num_experts",
    "top_k_experts": "moe.top_k",
    "use_bitnet": "bitnet.enabled",
    "ode_solver": "attention.ode.solver",
    "ode_steps": "attention.ode.steps",
    "retention_heads": "attention.retnet.heads",
    "use_factorized_embedding": "embedding.factorized.enabled",
    "factorized_embedding_dim": "embedding.factorized.dim",
    "use_embedding_conv": "embedding.conv.enabled",
    "embedding_conv_kernel": "embedding.conv.kernel",
}
