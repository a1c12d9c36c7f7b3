"""attn_implementation="triton": who accepts it, what it does without a GPU, and the kernels in Triton's interpreter."""

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.modeling.ops import backend, decayed_scan, delta_rule
from frankenstein_hf.modeling.ops.backend import computing, use_triton

from ..mixers.run import make_mixer, run
from ..tiny import tiny_config, tiny_model, tokens

HERE = Path(__file__).parent


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is said, once each."""
    said: dict[str, None] = {}
    monkeypatch.setattr(backend.logger, "warning_once", lambda message: said.setdefault(message))
    return said  # type: ignore[return-value]


@pytest.fixture
def pretended(monkeypatch):
    """As if the interpreter were on and triton installed; nothing here launches a kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "find_spec", lambda name: True)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_without_a_gpu_triton_is_refused_when_it_is_chosen(name, no_gpu, monkeypatch):
    message = r"needs tensors on a GPU, got them on 'cpu'.*attn_implementation='sdpa'"
    with pytest.raises(ValueError, match=message):
        tiny_model(["standard", name], attn_implementation="triton")
    model = tiny_model(["standard", name])
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("triton")
    tiny_model("standard", attn_implementation="triton")(tokens(1, 5))  # nothing there has a kernel
    # chosen where there is a GPU, run where there is none
    model.config._attn_implementation_internal = "triton"
    model.model.embed_tokens.register_forward_hook(lambda *_: pytest.fail("computed something"))
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 5))


def test_without_a_gpu_the_cores_say_so(no_gpu):
    q = torch.randn(1, 1, 5, 4)
    for core, inputs in ((decayed_scan.decayed_scan, (q, q, q)), (delta_rule.delta_rule, (q, q, q, q))):
        with pytest.raises(ValueError, match="needs tensors on a GPU"):
            core(*inputs, implementation="triton")
        with pytest.raises(ValueError, match="'cuda'"):
            core(*inputs, implementation="cuda")


def test_without_the_package_the_error_names_it(monkeypatch, pretended):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        tiny_model("gla", attn_implementation="triton")(tokens(1, 5))


def test_our_models_accept_it_however_it_is_asked_for(tmp_path, pretended):
    model = tiny_model("gla")
    model.set_attn_implementation("triton")
    assert model.model.config._attn_implementation == "triton"
    model.save_pretrained(tmp_path, save_code=False)
    assert "triton" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="triton")
    assert loaded.model.config._attn_implementation == "triton"
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(loaded(tokens(1, 5)).logits, tiny_model("gla")(tokens(1, 5)).logits)
    with pytest.raises(ValueError, match="'triton'"):
        AutoModelForCausalLM.from_config(tiny_config("gla"), attn_implementation="trition")


def test_no_other_model_is_told():
    assert "triton" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    config = LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(ValueError, match="triton"):
        LlamaForCausalLM._from_config(config, attn_implementation="triton")


def test_softmax_mixers_run_as_under_sdpa(no_gpu, warnings):
    pattern, x = ["standard", "gqa", "swa", "memory"], tokens(2, 20)
    expected, model = tiny_model(pattern), tiny_model(pattern, attn_implementation="triton")
    assert torch.equal(model(x).logits, expected(x).logits)
    assert not warnings


def test_a_mixer_without_kernels_falls_back_with_one_warning(no_gpu, warnings):
    x = tokens(2, 9)
    model = tiny_model(["mamba", "mamba"], attn_implementation="triton")
    assert torch.equal(model(x).logits, tiny_model(["mamba", "mamba"])(x).logits)
    assert list(warnings) == ["Mamba has no Triton kernel; attn_implementation='triton' computes it in PyTorch."]


@pytest.mark.parametrize("core", [decayed_scan.decayed_scan, delta_rule.delta_rule])
def test_fp64_and_very_wide_heads_fall_back_with_a_warning(core, pretended, warnings):
    count = 3 if core is decayed_scan.decayed_scan else 4
    for shape, dtype in (((1, 1, 9, 4), torch.float64), ((1, 1, 9, 257), torch.float32)):
        inputs = [torch.randn(shape, dtype=dtype) for _ in range(count)]
        inputs[1] = inputs[1] / inputs[1].norm(dim=-1, keepdim=True)
        assert torch.equal(core(*inputs, implementation="triton")[0], core(*inputs)[0])
    assert len(warnings) == 2


def test_the_announcement_holds_for_its_thread_and_its_duration(pretended):
    x = torch.zeros(1, 1, 2, 4)
    found = {}

    def look() -> None:
        found["thread"] = use_triton(None, x)

    with pytest.raises(KeyError), computing("triton"):
        assert use_triton(None, x)
        assert not use_triton("chunked", x)
        with computing("sdpa"):
            assert not use_triton(None, x)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        raise KeyError
    assert found == {"thread": False}
    assert not use_triton(None, x)


@pytest.mark.parametrize("name, module", [("gla", decayed_scan), ("gated_deltanet", delta_rule)])
def test_gradient_checkpointing_replays_under_the_same_backend(name, module, pretended, monkeypatch):
    answers = []

    def spy(*arguments):
        answers.append(use_triton(*arguments))
        return False

    monkeypatch.setattr(module, "use_triton", spy)
    model, x = tiny_model([name, name], attn_implementation="triton").train(), tokens(1, 6)
    model.gradient_checkpointing_enable()
    loss = model(x, labels=x).loss
    assert answers == [True] * 2
    loss.backward()
    assert answers == [True] * 4


def test_rolled_back_states_are_replayed_under_the_same_backend(pretended, monkeypatch):
    answers = []

    def spy(*arguments):
        answers.append(use_triton(*arguments))
        return False

    monkeypatch.setattr(decayed_scan, "use_triton", spy)
    model, x = tiny_model("gla", attn_implementation="triton"), tokens(1, 4).repeat(1, 3)
    model.generate(x, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)
    assert answers and all(answers)


# Triton is large and its interpreter must be chosen before it is imported: a process of its own.

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (pip install triton)")
GROUPS = [
    "decayed_scan",
    "delta_rule",
    "several_tiles or again or only",
    "segments or later or half",
    "mixer",
    "models",
]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("group", GROUPS)
def test_the_kernels_in_the_interpreter(group):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", group]
    run_in_process([*command, str(HERE / "triton_in_interpreter.py")], TRITON_INTERPRET="1")


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(tmp_path):
    command = [sys.executable, "-m", "tests.ops.triton_compiles"]
    run_in_process(command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def run_in_process(command: list[str], **environment: str) -> None:
    run = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | environment, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


@pytest.mark.parametrize("name", [spec.name for spec in MIXERS if not spec.needs_input_ids])
def test_a_mixer_says_whether_it_needs_a_kernel(name):
    """Without a GPU, exactly the mixers that claim to reach a core with kernels are refused by it."""
    mixer = make_mixer(name).float()
    x = torch.randn(1, 20, mixer.hidden_size)
    arguments = {"is_causal": MIXERS.get(name).causal, "backend": "triton"}
    if mixer.needs_kernel:
        with pytest.raises(ValueError, match="needs tensors on a GPU"):
            run(mixer, x, **arguments)
    else:
        assert run(mixer, x, **arguments).isfinite().all()
