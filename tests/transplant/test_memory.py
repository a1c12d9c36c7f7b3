"""Converting a sharded checkpoint needs little more than the model it makes."""

import subprocess
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

CODE = """
import sys, frankenstein_hf as fhf
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
fhf.from_transformers(sys.argv[1])  # everything that is imported once
def reset():
    open("/proc/self/clear_refs", "w").write("5")
reset()
before = peak()
model = fhf.from_transformers(sys.argv[2], layer_pattern={0: "gla"})
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(peak() - before, size)
"""


@pytest.mark.slow
def test_the_peak_is_one_copy_and_a_shard(tmp_path):
    small = dict(vocab_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, hidden_size=32)
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "small")
    large = dict(vocab_size=8000, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, hidden_size=1024)
    LlamaForCausalLM(LlamaConfig(**large)).save_pretrained(tmp_path / "large", max_shard_size="60MB")
    shards = [path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")]
    assert len(shards) > 5
    command = [sys.executable, "-c", CODE, str(tmp_path / "small"), str(tmp_path / "large")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, size = map(int, output.split())
    assert peak <= size + 1.3 * max(shards), (peak, size, max(shards))
