"""The scripts in examples/ do what they say, here with fewer steps; docs/gallery.md shows all of them."""

import asyncio
import json
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import frankenstein_hf as fhf
from frankenstein_hf.data import corpus as corpora
from frankenstein_hf.data.conversations import TURNS

from .hub.own import registering
from .tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def example(name: str):
    """The `main` of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.fixture
def short_corpus(monkeypatch):
    """A third of the standard library's docstrings."""
    read = corpora.read_corpus

    def some(cache_dir=None):
        whole = read(cache_dir)
        return corpora.Corpus(whole.documents[::3], whole.python, whole.sha256)

    monkeypatch.setattr(corpora, "read_corpus", some)


def test_every_example_is_in_the_gallery_and_says_how_to_start_it():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"(../examples/{path.name})" in page, path
        assert f"examples/{path.name}" in path.read_text(encoding="utf-8") or path.name == "min_gru.py"


def test_pretraining_an_encoder_lowers_its_loss(short_corpus, tmp_path):
    losses = example("pretrain_encoder")(str(tmp_path), steps=3)
    assert losses["after"] < losses["before"] and (tmp_path / "modeling_frankenstein.py").is_file()


def test_an_own_mixer_is_trained_saved_with_its_file_and_loaded(short_corpus, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with registering() as patch:
        patch.delitem(sys.modules, "min_gru", raising=False)
        found = example("own_mixer")(str(tmp_path), steps=4)
        patch.delitem(sys.modules, "min_gru", raising=False)
    assert found["last"] < found["first"] and found["difference"] == 0
    assert (tmp_path / "modeling_own_min_gru.py").is_file()


def test_an_adapter_is_merged_and_pushed(short_corpus, tmp_path):
    pytest.importorskip("peft")
    found = example("lora")(str(tmp_path), steps=3)
    assert found["difference"] < 1e-4 and found["pushed"] == 0
    pushed = tmp_path / "hub" / "me" / "monster"
    assert {"README.md", "model.safetensors", "modeling_mixers_gated_gla.py", "tokenizer.json"} <= {
        path.relative_to(pushed).as_posix() for path in pushed.rglob("*")
    }


def test_supervised_fine_tuning_and_preferences_through_trl(tmp_path):
    pytest.importorskip("trl")
    found = example("trl_sft_dpo")(str(tmp_path), steps=3)
    assert found["margin"] > 0


def test_weights_of_eight_bits_by_whatever_is_installed(tmp_path):
    found = runpy.run_path(str(EXAMPLES / "quantize.py"))
    names = found["configurations"]()
    if not names:
        pytest.skip("neither quanto nor torchao is installed")
    differences = found["main"](str(tmp_path), length=24)
    assert set(differences) == set(names) and all(0 < value < 0.1 for value in differences.values())


def test_torchao_quantises_the_same_layers(tmp_path):
    pytest.importorskip("torchao")
    assert "torchao" in runpy.run_path(str(EXAMPLES / "quantize.py"))["configurations"]()


def test_embeddings_of_every_width_find_something(short_corpus, tmp_path):
    pytest.importorskip("sentence_transformers")
    found = example("matryoshka")(str(tmp_path), steps=3)
    assert set(found) == {128, 32, 8} and all(0 <= value <= 1 for value in found.values())


@pytest.mark.slow  # importing the harness takes as long as everything else here
def test_the_harness_runs_without_a_network(tmp_path):
    pytest.importorskip("lm_eval")
    code = f"import runpy; print(runpy.run_path({str(EXAMPLES / 'evaluate.py')!r})['main'](None, {str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'acc,none': " in done.stdout


def test_the_questions_of_the_evaluation_make_a_task_and_a_model(tmp_path):
    names = runpy.run_path(str(EXAMPLES / "evaluate.py"))
    names["write_task"](tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert rows == names["QUESTIONS"] and "doc_to_choice" in (tmp_path / "words.yaml").read_text()
    assert AutoModelForCausalLM.from_pretrained(names["make_model"](tmp_path / "model")).config.num_hidden_layers == 2


@pytest.mark.slow
def test_export_onnx(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    example("export_onnx")(None, str(tmp_path / "encoder.onnx"))
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert "embeddings (3, 64)" in said and float(said.split()[-4]) < 1e-4


# ---------------------------------------------------------------------- transformers' server


@pytest.fixture
def chat_folder(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS.replace("eos_token", "' '")
    tiny_model(["gla", "standard"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_server_of_transformers_finds_our_models_and_generates(chat_folder):
    """What `transformers serve` does with a folder, up to the wire: it looks the class up, loads and generates."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager(
        device="cpu", force_model=chat_folder
    )
    from transformers.cli.serving.utils import GenerateManager

    model, processor = manager.load_model_and_processor(manager.process_model_name(chat_folder))
    assert type(model) is fhf.FrankensteinForCausalLM
    inputs = processor("t5 t6 t7", return_tensors="pt", return_token_type_ids=False)
    settings = model.generation_config
    settings.update(max_new_tokens=5, do_sample=False)
    expected = model.generate(**inputs, generation_config=settings)[0, 3:]
    text = processor.decode(expected, skip_special_tokens=True)

    async def serve():
        generation = GenerateManager()
        whole = await generation.generate_non_streaming(model, processor, inputs, settings, "one")
        queue, _ = generation.generate_streaming(model, processor, inputs, settings, "two")
        parts = []
        while (part := await queue.get()) is not None:
            parts.append(str(part))
        return whole, "".join(parts)

    (said, length, ids), streamed = asyncio.run(serve())
    assert said == text and length == 3 and torch.equal(ids, expected)
    assert streamed.split() == text.split()


def test_the_server_answers_chats(chat_folder):
    """The whole server, where its packages are installed."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(force_model=chat_folder, device="cpu", port=port, non_blocking=True)
    try:
        for _ in range(600):
            if server.server.started:
                break
            time.sleep(0.05)
        question = {"model": chat_folder, "messages": [{"role": "user", "content": "t5 t6"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/chat/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    finally:
        server.kill_server()
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["usage"]["completion_tokens"] == 4
