"""Measure mixers and their cores: time, growth with length, memory, decoding — as ratios from one run.

    python scripts/benchmark_mixers.py                                  # everything the README quotes
    python scripts/benchmark_mixers.py --suites mixers --mixers gla swa --lengths 512 2048

Times are process CPU seconds of forward + backward on one thread in fp32, the median of interleaved runs: every round
runs each case once, so that a busy machine slows all of them alike. Only ratios within one run mean anything. Memory is
the peak above what the process held before, in a forked child.
"""

import ctypes
import functools
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comparing import written_by
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.data.atomic import write_json, write_text
from frankenstein_hf.modeling.context import Batch, make_context
from frankenstein_hf.modeling.implementations import implementation
from frankenstein_hf.modeling.mixers.base import Run
from frankenstein_hf.modeling.ops.continuum_attention import continuum_attention
from frankenstein_hf.modeling.ops.decayed_scan import decayed_scan
from frankenstein_hf.modeling.ops.delta_rule import delta_rule
from frankenstein_hf.modeling.ops.first_passage_attention import first_passage_attention
from frankenstein_hf.modeling.ops.forgetting_attention import forgetting_attention
from frankenstein_hf.modeling.ops.sigmoid_attention import sigmoid_attention
from frankenstein_hf.modeling.ops.window_attention import window_attention
from frankenstein_hf.modeling.positions import RotaryEmbedding
from frankenstein_hf.training.pictures import Picture, lengths_below

PREAMBLE = """Batch of one, 4 heads of 64, width 256, fp32, one thread, forward + backward, process CPU time, medians of
interleaved runs; only ratios within one table mean anything. "scans" is all of a recurrent mixer that follows its
projections (convolutions, norms, core; for titan window and memory), "mixers" whole mixers as they are initialised. A
gate is the mean log-decay of a token; mixers whose decay is fixed, or not an input of the scan, run as they are. Growth
is that of time, fourfold where cost is linear and length quadruples; MB are peak memory, also in units of the eager
attention of transformers."""
B, H, W, D = 1, 4, 64, 256  # batch, heads, head width, model width
Step = Callable[[], Any]


@dataclass
class Arguments:
    """What to measure."""

    suites: list[str] = field(
        default_factory=lambda: ["cores", "memory", "mamba", "encoder", "decode", "mixers", "import"],
        metadata={
            "help": "any of: cores quadratic memory mamba encoder decode mixers scans sparse models tokens compiled "
            "import"
        },
    )
    mixers: list[str] = field(default_factory=fhf.list_mixers, metadata={"help": "mixers of the suites mixers, decode"})
    lengths: list[int] = field(default_factory=lambda: [2048, 8192], metadata={"help": "lengths of cores and mixers"})
    shapes: list[str] = field(
        default_factory=lambda: ["32x128", "8x512", "2x2048", "1x8192"],
        metadata={"help": "batch x tokens of the suites models and compiled"},
    )
    pasts: list[int] = field(
        default_factory=lambda: [64, 1024, 8192], metadata={"help": "cached tokens of the suite tokens"}
    )
    gates: list[float] = field(default_factory=lambda: [-0.05, -2.0], metadata={"help": "log-decays of the cores"})
    rounds: int = field(default=3, metadata={"help": "interleaved runs of every case"})
    threads: int = field(default=1, metadata={"help": "PyTorch threads"})
    json: str | None = field(default=None, metadata={"help": "where to write the results"})
    markdown: str | None = field(default=None, metadata={"help": "where to write the tables as a page"})
    only_render: bool = field(default=False, metadata={"help": "measure nothing: write what --json has"})
    plot: str | None = field(default=None, metadata={"help": "where to draw scans and mixers (needs 'plots')"})


# ---------------------------------------------------------------------- measuring


def interleaved(cases: dict[str, Step], rounds: int, warm_up: bool = True) -> dict[str, float]:
    """Median process CPU seconds of every case; each round runs all of them once."""
    if warm_up:
        for step in cases.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, step in cases.items():
            gc.collect()
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes(step: Step) -> int:
    """Peak resident memory of `step` above what the process held before it, measured in a forked child."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is held counts, not how the heap has been cut up before
        libc.malloc_trim(0)  # else memory freed by earlier runs would hide what this one needs
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark

        def resident(key: str) -> int:
            line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
            return int(line.split()[1]) * 1024

        before = resident("VmRSS")
        step()
        os.write(write, str(resident("VmHWM") - before).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return int(result)


def train_step(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Step:
    """Forward and backward of `function(*inputs).sum()`."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).sum().backward()

    return step


def heads(T: int) -> torch.Tensor:
    """Random [B, H, T, W]."""
    return torch.randn(B, H, T, W)


# ---------------------------------------------------------------------- suites


def core_cases(T: int, gate: float) -> dict[str, Step]:
    """The recurrent and windowed cores beside causal SDPA, gates around `gate` a step."""
    q, k, v = heads(T), F.normalize(heads(T), dim=-1), heads(T)
    scalar = gate * torch.rand(B, H, T).mul(1.0).add(0.5)
    per_key = gate * torch.rand(B, H, T, W).add(0.5)
    beta = torch.rand(B, H, T)

    def ours(q, k, v, g, beta):
        beta = beta[..., None]
        return delta_rule(q, k, beta * k, beta * v, g, scale=W**-0.5)[0]

    def theirs(q, k, v, g, beta):
        return torch_chunk_gated_delta_rule(*(x.transpose(1, 2) for x in (q, k, v)), g.mT, beta.mT)[0]

    return {
        "standard (causal sdpa)": train_step(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v),
        "gated_deltanet": train_step(ours, q, k, v, scalar, beta),
        "transformers' gated delta rule": train_step(theirs, q, k, v, scalar, beta),
        "gla": train_step(lambda q, k, v, g: decayed_scan(q, k, v, g)[0], q, k, v, per_key),
        "swa (256, 4 sinks)": train_step(
            lambda q, k, v: window_attention(q, k, v, left=251, right=0, num_sinks=4), q, k, v
        ),
    }


def cores(arguments: Arguments) -> dict[str, Any]:
    """Time in units of causal SDPA, and growth from the shortest to the longest length."""
    results: dict[str, Any] = {}
    for gate in arguments.gates:
        seconds = {T: interleaved(core_cases(T, gate), arguments.rounds) for T in arguments.lengths}
        first, last = min(seconds), max(seconds)
        for name in seconds[last]:
            row = {f"/ sdpa at {T}": seconds[T][name] / seconds[T]["standard (causal sdpa)"] for T in seconds}
            row[f"growth {first} to {last}"] = seconds[last][name] / seconds[first][name]
            row["speed-up over transformers"] = (
                seconds[last]["transformers' gated delta rule"] / seconds[last][name]
                if name == "gated_deltanet"
                else None
            )
            results[f"{name}, gate {gate}"] = row
    return results


def quadratic_cases(T: int) -> dict[str, Step]:
    """The cores of attention that is quadratic in T beside causal SDPA, forgetting little and much."""
    q, k, v, own = heads(T), heads(T), heads(T), torch.arange(T)[None]
    level = -(own + 1.0).log()[:, None].expand(B, H, T)
    walk = torch.randn(B, H, T).double().cumsum(-1)
    field, levels = (walk + torch.randn(B, H, T) for _ in range(2))

    def fox(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor) -> torch.Tensor:
        return forgetting_attention(q, k, v, log_f.double().cumsum(-1), own, own)[0]

    cases = {
        "standard (causal sdpa)": train_step(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
    }
    for gate in (-0.001, -0.05, -2.0):
        cases[f"fox, gate {gate}"] = train_step(fox, q, k, v, gate * torch.rand(B, H, T).add(0.5))
    cases["sigmoid"] = train_step(lambda *x: sigmoid_attention(*x, own), q, k, v, level)
    cases["ca"] = train_step(lambda *x: continuum_attention(*x, own), q, k, v)
    cases["fpa"] = train_step(lambda *x: first_passage_attention(*x)[0], q, k, v, field, levels, torch.ones(H))
    return cases


def quadratic(arguments: Arguments) -> dict[str, Any]:
    """Time in units of causal SDPA, and peak memory in units of eager attention at the greatest length."""
    results: dict[str, dict[str, float]] = {}
    last = max(arguments.lengths)
    eager = peak_bytes(eager_attention(last))
    for T in arguments.lengths:
        cases = quadratic_cases(T)
        seconds = interleaved(cases, arguments.rounds)
        for name, step in cases.items():
            results.setdefault(name, {})[f"/ sdpa at {T}"] = seconds[name] / seconds["standard (causal sdpa)"]
            if last == T:
                results[name]["/ eager attention's memory"] = peak_bytes(step) / eager
    return results


def eager_attention(T: int) -> Step:
    """Forward and backward of transformers' causal attention that materialises its scores."""
    mask = torch.full((T, T), -torch.inf).triu(1)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    return train_step(
        lambda *x: eager_attention_forward(module, *x, mask, scaling=W**-0.5)[0], heads(T), heads(T), heads(T)
    )


def memory(arguments: Arguments) -> dict[str, Any]:
    """Peak memory in MB and in units of eager attention, and its growth."""
    peaks: dict[str, dict[int, int]] = {}
    for T in arguments.lengths:
        cases = {**core_cases(T, arguments.gates[0]), "transformers' eager attention": eager_attention(T)}
        for name, step in cases.items():
            peaks.setdefault(name, {})[T] = peak_bytes(step)
    first, last = min(arguments.lengths), max(arguments.lengths)
    return {
        name: {
            f"MB at {last}": peak[last] / 2**20,
            "/ eager attention": peak[last] / peaks["transformers' eager attention"][last],
            f"growth {first} to {last}": peak[last] / max(peak[first], 1),
        }
        for name, peak in peaks.items()
    }


def build_mixer(name: str, **params: Any) -> tuple[Any, Any]:
    """A mixer of width 256 with 4 heads, and its configuration."""
    config = fhf.FrankensteinConfig(
        vocab_size=512, hidden_size=D, num_attention_heads=H, num_hidden_layers=1, layer_pattern=name,
        mixer_params={name: params},
    )  # fmt: skip
    spec = MIXERS.get(name)
    mixer = implementation(spec)(config, 0)
    for module in mixer.modules():
        if hasattr(module, "init_parameters"):
            module.init_parameters()
    return mixer, config


def plain_context(x: torch.Tensor, config: Any, is_causal: bool) -> Any:
    """A batch [B, T, D] without pads, documents or a past."""
    batch = Batch.like(x, input_ids=torch.zeros(x.shape[:2], dtype=torch.long))
    return make_context(batch, is_causal=is_causal, rotary_function=RotaryEmbedding(config))


def make_mixer(name: str, is_causal: bool = True) -> Callable[..., torch.Tensor]:
    """A whole mixer as a function of [B, T, D]."""
    mixer, config = build_mixer(name)
    if MIXERS.get(name).takes_residual:
        layer = torch.nn.Module()
        layer.input_layernorm = torch.nn.LayerNorm(D)
        mixer.join(layer)
    return lambda x: mixer(x, plain_context(x, config, is_causal))[0]


def scan_step(name: str, T: int, gate: float) -> Step:
    """Forward and backward of a recurrent mixer's scan: all that follows the projections, log-decays around `gate`."""
    mixer, config = build_mixer(name)
    x = torch.randn(B, T, D)
    with torch.no_grad():
        inputs = mixer.project(x, plain_context(x, config, True).rows[0])
    leaves = scan_leaves(inputs, gate)
    return train_step(lambda *values: mixer.scan(dict(zip(inputs, values)), {}, Run())[0], *leaves)


def titan_step(memory: str, T: int, gate: float) -> Step:
    """Forward and backward of titan's window attention and of its memory."""
    mixer, _ = build_mixer("titan", memory=memory)
    with torch.no_grad():
        inputs = mixer.memorable(torch.randn(B, T, D))
    leaves = scan_leaves(inputs, gate)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        recalled, _ = mixer.remember(dict(zip(inputs, values)), {}, Run())
        return window_attention(q, k, v, left=mixer.params.window_size - 1, right=0).mT.sum() + recalled.sum()

    return train_step(run, heads(T), heads(T), heads(T), *leaves)


def scan_leaves(inputs: dict[str, torch.Tensor], gate: float) -> list[torch.Tensor]:
    """A scan's inputs, the logarithms of decays among them replaced by ones around `gate`."""
    return [gate * torch.rand_like(x).add(0.5) if name.startswith("log_") else x for name, x in inputs.items()]


def scans(arguments: Arguments) -> dict[str, Any]:
    """Recurrent mixers without their projections, in units of causal SDPA, with growth and peak memory."""
    names = [n for n in arguments.mixers if hasattr(implementation(MIXERS.get(n)), "project") and MIXERS.get(n).causal]
    make: dict[str, Callable[[int, float], Step]] = {name: functools.partial(scan_step, name) for name in names}
    if "titan" in arguments.mixers:
        make |= {f"titan, {kind} memory": functools.partial(titan_step, kind) for kind in ("linear", "mlp")}
    results: dict[str, dict[str, float]] = {name: {} for name in make}
    *_, before, last = [None, *sorted(arguments.lengths)]
    for gate in arguments.gates:
        seconds = {}
        for T in arguments.lengths:
            q, k, v = heads(T), heads(T), heads(T)
            sdpa = train_step(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
            steps = {name: step(T, gate) for name, step in make.items()}
            seconds[T] = interleaved({"sdpa": sdpa, **steps}, arguments.rounds)
            for name in make:
                results[name][f"/ sdpa at {T}, gate {gate:g}"] = seconds[T][name] / seconds[T]["sdpa"]
        for name in make if before else ():
            growth = seconds[last][name] / seconds[before][name]
            results[name][f"growth {before} to {last}, gate {gate:g}"] = growth
    eager = peak_bytes(eager_attention(last))
    for name, step in make.items():
        peak = peak_bytes(step(last, arguments.gates[0]))
        results[name] |= {f"MB at {last}": peak / 2**20, "/ eager attention": peak / eager}
    return results


def mixers(arguments: Arguments) -> dict[str, Any]:
    """Whole mixers (projections included), causal and bidirectional, in units of `standard`."""
    results: dict[str, dict[str, float]] = {}
    *_, before, last = [None, *sorted(arguments.lengths)]
    for mode in ("causal", "bidirectional"):
        names = [name for name in arguments.mixers if getattr(MIXERS.get(name), mode)]
        names = list(dict.fromkeys(["standard", *names]))
        seconds = {}
        for T in arguments.lengths:
            steps = {name: train_step(make_mixer(name, mode == "causal"), torch.randn(B, T, D)) for name in names}
            seconds[T] = interleaved(steps, arguments.rounds)
            for name in names:
                results.setdefault(name, {})[f"{mode} / standard at {T}"] = seconds[T][name] / seconds[T]["standard"]
        for name in names:
            if before:
                results[name][f"{mode}, growth {before} to {last}"] = seconds[last][name] / seconds[before][name]
            step = train_step(make_mixer(name, mode == "causal"), torch.randn(B, last, D))
            results[name][f"{mode}, MB at {last}"] = peak_bytes(step) / 2**20
    return results


# name in the table: mixer, whether causal, parameters; a budget of 1024 keys where keys are selected
SPARSE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "longformer, window 256": ("longformer", True, {}),
    "bigbird, window 256": ("bigbird", True, {"window_size": 256}),
    "sparse_transformer, stride 90": ("sparse_transformer", True, {"stride": 90}),
    "msa, 8 blocks of 128": ("msa", True, {"topk_blocks": 8}),
    "sparda, 8 blocks of 128": ("sparda", True, {"topk_blocks": 8}),
    "nsa, 16 blocks of 64, window 512": ("nsa", True, {}),
    "lsa, 1024 keys": ("lsa", True, {"num_long_range": 1024}),
    "sparsek, k 128": ("sparsek", True, {}),
    "probsparse, encoder": ("probsparse", False, {}),
}


def sparse_step(name: str, T: int) -> Step:
    """Forward and backward of a whole mixer in training, its auxiliary losses included."""
    mixer_name, is_causal, params = SPARSE[name]
    mixer, config = build_mixer(mixer_name, **params)
    mixer.train()

    def run(x: torch.Tensor) -> torch.Tensor:
        out, extras = mixer(x, plain_context(x, config, is_causal))
        return torch.stack([out.sum(), *extras.aux_losses.values()])

    return train_step(run, torch.randn(B, T, D))


def sparse(arguments: Arguments) -> dict[str, Any]:
    """Whole sparse mixers, projections and auxiliary losses included, in units of SDPA alone in the same mode."""
    names = [name for name, (mixer, _, _) in SPARSE.items() if mixer in arguments.mixers]
    results: dict[str, dict[str, float]] = {name: {} for name in names}
    seconds: dict[int, dict[str, float]] = {}
    for T in arguments.lengths:
        steps = {name: sparse_step(name, T) for name in names}
        for mode in (True, False):
            steps[f"sdpa {mode}"] = train_step(
                lambda *x, mode=mode: F.scaled_dot_product_attention(*x, is_causal=mode), heads(T), heads(T), heads(T)
            )
        seconds[T] = interleaved(steps, arguments.rounds)
        for name in names:
            results[name][f"/ sdpa at {T}"] = seconds[T][name] / seconds[T][f"sdpa {SPARSE[name][1]}"]
    first, last = min(seconds), max(seconds)
    for name in names:
        results[name][f"growth {first} to {last}"] = seconds[last][name] / seconds[first][name]
    at = min(last, 8192)  # eager attention would need 12 GB at twice that
    eager = peak_bytes(eager_attention(at))
    for name in names:
        results[name][f"memory / eager attention at {at}"] = peak_bytes(sparse_step(name, at)) / eager
    return results


def mamba(arguments: Arguments) -> dict[str, Any]:
    """Our mamba mixer beside transformers' slow path: forward and training step at T = 2048, width 256."""
    T = 2048
    x = torch.randn(B, T, D)
    ours = make_mixer("mamba")
    theirs = MambaMixer(MambaConfig(hidden_size=D, num_hidden_layers=1), 0)

    def slow(x: torch.Tensor) -> torch.Tensor:
        return theirs.eval()(x)  # training mode would take the same path, with a warning

    with torch.no_grad():
        forward = interleaved({"ours": lambda: ours(x), "transformers": lambda: slow(x)}, arguments.rounds)
    step = interleaved({"ours": train_step(ours, x)}, arguments.rounds)
    step |= interleaved({"transformers": train_step(slow, x)}, rounds=1, warm_up=False)  # minutes a run
    return {
        "forward": {"speed-up over transformers": forward["transformers"] / forward["ours"]},
        "training step": {"speed-up over transformers": step["transformers"] / step["ours"]},
    }


def encoder(arguments: Arguments) -> dict[str, Any]:
    """A training step of a 6-layer `standard` encoder beside ModernBERT of the same sizes; 15 and 30 % masked."""
    batch, T, vocabulary = 8, 256, 8192
    ids = torch.randint(5, vocabulary, (batch, T))
    common = dict(vocab_size=vocabulary, hidden_size=D, num_hidden_layers=6, num_attention_heads=H)
    modern = dict(
        intermediate_size=1024, global_attn_every_n_layers=1, attn_implementation="sdpa", pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    own = dict(intermediate_size=1024, layer_pattern="standard", hidden_act="gelu", norm="layer_norm")
    models = {
        "ModernBERT": ModernBertForMaskedLM(ModernBertConfig(**common, **modern)),
        "ModernBERT, sparse_prediction": ModernBertForMaskedLM(
            ModernBertConfig(**common, **modern, sparse_prediction=True)
        ),
        "ours, dense logits": fhf.FrankensteinForMaskedLM(fhf.FrankensteinConfig(**common, **own)),
        "ours, sparse_prediction": fhf.FrankensteinForMaskedLM(
            fhf.FrankensteinConfig(**common, **own, sparse_prediction=True)
        ),
    }
    results: dict[str, dict[str, float]] = {}
    for rate in (0.15, 0.3):
        labels = ids.masked_fill(torch.rand(ids.shape) > rate, -100)

        def step(model: torch.nn.Module, labels: torch.Tensor = labels) -> Step:
            optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

            def run() -> None:
                optimizer.zero_grad()
                model(input_ids=ids, labels=labels).loss.backward()
                optimizer.step()

            return run

        seconds = interleaved({name: step(model) for name, model in models.items()}, arguments.rounds)
        for name, value in seconds.items():
            results.setdefault(name, {})[f"speed-up over ModernBERT, {rate:.0%} masked"] = seconds["ModernBERT"] / value
    return results


def decode(arguments: Arguments) -> dict[str, Any]:
    """Decoding one token after 4096 tokens, in units of the same after 64."""
    results: dict[str, Any] = {}
    for name in arguments.mixers:
        if not MIXERS.get(name).causal:
            continue
        config = fhf.FrankensteinConfig(
            vocab_size=512, hidden_size=D, num_attention_heads=H, num_hidden_layers=2, layer_pattern=name
        )
        model = fhf.FrankensteinForCausalLM(config).eval()
        token = torch.zeros(1, 1, dtype=torch.long)
        caches = {}
        with torch.no_grad():
            for length in (64, 4096):
                caches[length] = DynamicCache(config=config)
                model(torch.randint(0, 512, (1, length)), cache=caches[length], logits_to_keep=1)

            def step(length: int, model: Any = model, caches: dict = caches, token: Any = token) -> Step:
                def run() -> None:
                    for _ in range(20):
                        model(token, cache=caches[length])

                return run

            seconds = interleaved({str(n): step(n) for n in caches}, arguments.rounds)
        results[name] = {"one token after 4096 / after 64": seconds["4096"] / seconds["64"]}
    return results


# ---------------------------------------------------------------------- whole models at everyday shapes


SMALL = dict(vocab_size=4096, hidden_size=D, num_hidden_layers=4, num_attention_heads=H)
WIDTH_OF_FEED_FORWARD = 704  # what `FrankensteinConfig` chooses: 8/3 of 256, rounded up to a multiple of 32


def whole_models(names: list[str], longest: int) -> dict[str, torch.nn.Module]:
    """Causal models of four layers and width 256: those of transformers, the default pattern, one for every mixer."""
    common = {**SMALL, "intermediate_size": WIDTH_OF_FEED_FORWARD, "max_position_embeddings": longest + 64}
    llama = LlamaConfig(**common, num_key_value_heads=H, attn_implementation="sdpa")
    qwen = Qwen3NextConfig(
        **common, num_key_value_heads=H, head_dim=W, linear_num_key_heads=H, linear_num_value_heads=H,
        linear_key_head_dim=W, linear_value_head_dim=W, num_experts=0, mlp_only_layers=[0, 1, 2, 3],
        attn_implementation="sdpa",
    )  # fmt: skip
    models: dict[str, torch.nn.Module] = {
        "transformers' Llama": LlamaForCausalLM(llama),
        "transformers' Qwen3-Next": Qwen3NextForCausalLM(qwen),
        "default pattern": fhf.FrankensteinForCausalLM(fhf.FrankensteinConfig(**common)),
    }
    for name in dict.fromkeys(["standard", *names]):
        if MIXERS.get(name).causal:
            models[name] = fhf.FrankensteinForCausalLM(fhf.FrankensteinConfig(**common, layer_pattern=name))
    return models


def whole_encoders(names: list[str], longest: int) -> dict[str, torch.nn.Module]:
    """ModernBERT of the same sizes, and encoders of ours."""
    common = {**SMALL, "intermediate_size": WIDTH_OF_FEED_FORWARD, "max_position_embeddings": longest + 64}
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    modern = ModernBertConfig(**common, **special, global_attn_every_n_layers=1, attn_implementation="sdpa")
    models: dict[str, torch.nn.Module] = {
        "transformers' ModernBERT": ModernBertForMaskedLM(modern),
        "default pattern": fhf.FrankensteinForMaskedLM(fhf.FrankensteinConfig(**common)),
    }
    for name in dict.fromkeys(["standard", *names]):
        if MIXERS.get(name).bidirectional:
            models[name] = fhf.FrankensteinForMaskedLM(fhf.FrankensteinConfig(**common, layer_pattern=name))
    return models


def loss_step(model: Callable[..., Any], parameters: list[torch.nn.Parameter], ids: torch.Tensor) -> Step:
    """Forward and backward of the loss."""

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step


def forward_step(model: Callable[..., Any], ids: torch.Tensor) -> Step:
    """Prefill: a forward that fills a cache and computes the last logits."""

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return step


def models(arguments: Arguments) -> dict[str, Any]:
    """Training step and prefill of whole models, in units of transformers' Llama (encoders: ModernBERT)."""
    results: dict[str, dict[str, float]] = {}
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    longest = max(T for _, T in shapes)
    causal, encoders = whole_models(arguments.mixers, longest), whole_encoders(arguments.mixers, longest)
    for batch, T in shapes:
        ids = torch.randint(5, SMALL["vocab_size"], (batch, T))
        column = f"{batch}x{T}"
        steps = {name: loss_step(model.train(), list(model.parameters()), ids) for name, model in causal.items()}
        seconds = interleaved(steps, arguments.rounds)
        for name, value in seconds.items():
            results.setdefault(name, {})[f"step {column}"] = value / seconds["transformers' Llama"]
        peak = peak_bytes(steps["transformers' Llama"])
        for name, step in steps.items():
            results[name][f"step's memory {column}"] = peak_bytes(step) / peak
        seconds = interleaved({n: forward_step(m.eval(), ids) for n, m in causal.items()}, arguments.rounds)
        for name, value in seconds.items():
            results[name][f"prefill {column}"] = value / seconds["transformers' Llama"]

        def encode(model: torch.nn.Module, ids: torch.Tensor = ids) -> Callable[..., Any]:
            return lambda input_ids, labels, use_cache: model(input_ids=input_ids, labels=labels)

        steps = {n: loss_step(encode(m.train()), list(m.parameters()), ids) for n, m in encoders.items()}
        seconds = interleaved(steps, arguments.rounds)
        for name, value in seconds.items():
            row = results.setdefault(name, {})
            row[f"encoder's step {column}"] = value / seconds["transformers' ModernBERT"]
    return results


def token_step(model: Callable[..., Any], cache: Any, name: str, past: int, static: bool) -> Step:
    """Ten tokens from `past` on, one at a time, with the cache taken back where it can be."""
    token = torch.zeros(1, 1, dtype=torch.long)

    def step() -> None:
        with torch.no_grad():
            for _ in range(10):
                model(token, **{name: cache}, use_cache=True)

    return step


def tokens(arguments: Arguments) -> dict[str, Any]:
    """Decoding a token: milliseconds, and in units of `standard`, from growing caches and compiled from static ones."""
    results: dict[str, dict[str, float]] = {}
    for past in arguments.pasts:
        built = whole_models(arguments.mixers, past)
        for static in (False, True):
            steps = {}
            for name, model in built.items():
                key = "past_key_values" if name.startswith("transformers") else "cache"
                if static and name.endswith("Qwen3-Next"):
                    continue  # has no static cache
                room = past + 64 + 10 * (arguments.rounds + 4)
                kind = functools.partial(StaticCache, max_cache_len=room) if static else DynamicCache
                cache = kind(config=model.eval().config)
                with torch.no_grad():
                    model(torch.randint(5, 4096, (1, past)), **{key: cache}, use_cache=True, logits_to_keep=1)
                run: Callable[..., Any] = model
                if static:
                    torch.compiler.reset()
                    run = torch.compile(model, fullgraph=True)
                steps[name] = token_step(run, cache, key, past, static)
            seconds = interleaved(steps, arguments.rounds)
            for name, value in seconds.items():
                row, what = results.setdefault(name, {}), f"{'compiled, static' if static else 'eager'}, after {past}"
                row[f"ms {what}"] = value * 100
                row[f"/ standard {what}"] = value / seconds["standard"]
    return results


def compiled(arguments: Arguments) -> dict[str, Any]:
    """A compiled training step in units of the eager one, and its graph breaks."""
    results: dict[str, dict[str, float]] = {}
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    for name, model in whole_models(arguments.mixers, max(T for _, T in shapes)).items():
        for batch, T in shapes:
            ids = torch.randint(5, SMALL["vocab_size"], (batch, T))
            parameters = list(model.train().parameters())
            torch.compiler.reset()
            steps = {
                "eager": loss_step(model, parameters, ids),
                "compiled": loss_step(torch.compile(model), parameters, ids),
            }
            seconds = interleaved(steps, arguments.rounds)
            row = results.setdefault(name, {})
            row[f"compiled / eager {batch}x{T}"] = seconds["compiled"] / seconds["eager"]
        torch.compiler.reset()
        explained = torch._dynamo.explain(model)(input_ids=ids, labels=ids, use_cache=False)
        row["graph breaks"] = explained.graph_break_count
    return results


def import_time(arguments: Arguments) -> dict[str, Any]:
    """Seconds `import frankenstein_hf` adds to importing torch and transformers' PreTrainedModel."""
    code = (
        "import time; start = time.process_time(); import torch; from transformers import PreTrainedModel; "
        "base = time.process_time(); import frankenstein_hf; print(base - start, time.process_time() - base)"
    )
    runs = [
        [float(part) for part in subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.split()]
        for _ in range(arguments.rounds)
    ]
    base, added = (statistics.median(column) for column in zip(*runs))
    return {"import frankenstein_hf": {"seconds added": added, "ratio to the rest": added / base}}


SUITES = {
    "cores": cores,
    "memory": memory,
    "quadratic": quadratic,
    "mamba": mamba,
    "encoder": encoder,
    "decode": decode,
    "mixers": mixers,
    "scans": scans,
    "sparse": sparse,
    "models": models,
    "tokens": tokens,
    "compiled": compiled,
    "import": import_time,
}


def table(title: str, rows: dict[str, dict[str, float | None]]) -> str:
    """A Markdown section."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"### {title}", "", f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in rows.items():
        cells = ("" if row.get(column) is None else f"{row[column]:.3g}" for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], arguments: Arguments, path: Path) -> None:
    """Time against length for the suites scans and mixers, a panel a family, the same axes for all."""
    columns = {
        "scans": ("core / causal SDPA", f"/ sdpa at {{T}}, gate {arguments.gates[0]:g}"),
        "mixers": ("whole mixer / standard", "causal / standard at {T}"),
    }
    suites: list[dict[str, dict[str, list[list[float]]]]] = []
    for suite, (unit, column) in columns.items():
        groups: dict[str, dict[str, list[list[float]]]] = {}
        for name, row in results.get(suite, {}).items():
            points = [[T, row[key]] for T in arguments.lengths if row.get(key := column.format(T=T)) is not None]
            if points:
                family = MIXERS.get(name.replace(",", " ").split()[0]).family
                groups.setdefault(f"{family}: {unit}", {})[name] = points
        suites.append(groups)
    picture = Picture("Time of forward + backward by length", sum(map(len, suites)), 4, size=(3.4, 2.5), share=True)
    panels = iter(picture.panels)
    for groups in suites:
        picture.multiples(groups, list(itertools.islice(panels, len(groups))))
    for axes in picture.panels:
        picture.level(axes, "", 1.0)
        axes.set(yscale="log", ylabel="relative time")
        lengths_below(axes, arguments.lengths, "tokens")
    picture.save(path)


def load(path: Path) -> dict[str, Any]:
    """The tables an earlier run left."""
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the suites and return their tables."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    if unknown := set(arguments.suites) - set(SUITES):
        raise ValueError(f"Unknown suites {sorted(unknown)}; allowed: {', '.join(SUITES)}.")
    for name in arguments.mixers:
        MIXERS.get(name)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = load(Path(arguments.json)) if arguments.only_render and arguments.json else {}
    for name in () if arguments.only_render else arguments.suites:
        results[name] = SUITES[name](arguments)
        print("\n" + table(name, results[name]), flush=True)
        if arguments.json:
            write_json(arguments.json, {"arguments": vars(arguments), "results": results})
    if arguments.markdown:
        flags = " ".join(sys.argv[1:] if argv is None else argv)
        head = f"# Benchmarks\n\n{written_by('benchmark_mixers.py', flags)}\n\n{PREAMBLE}\n"
        image = f"\n![time by length, a panel a family]({Path(arguments.plot).name})\n" if arguments.plot else ""
        tables = [table(name, rows) for name, rows in results.items()]
        write_text(arguments.markdown, "\n".join([head, *tables]) + image)
    if arguments.plot and {"scans", "mixers"} & set(results):
        draw(results, arguments, Path(arguments.plot))
    return results


if __name__ == "__main__":
    main()
