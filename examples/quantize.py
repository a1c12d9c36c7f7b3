"""Load a saved model with weights of eight bits: python examples/quantize.py [folder]

quanto and torchao replace the linear layers while a checkpoint is loaded; mixers call their projections as modules, so
every one of them is reached. Needs `pip install optimum-quanto` or `pip install torchao`; what is missing is skipped.
"""

import sys
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, QuantoConfig, TorchAoConfig

import frankenstein_hf as fhf


def configurations() -> dict[str, object]:
    """How to quantise, by the library that does it."""
    found: dict[str, object] = {}
    if find_spec("optimum") and find_spec("optimum.quanto"):
        found["quanto"] = QuantoConfig(weights="int8")
    if find_spec("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig

        found["torchao"] = TorchAoConfig(Int8WeightOnlyConfig())
    return found


def main(folder: str = "outputs/quantized", length: int = 256) -> dict[str, float]:
    config = fhf.FrankensteinConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        layer_pattern=["gated_deltanet", "mla", "mamba", "standard"],
    )  # fmt: skip
    fhf.FrankensteinForCausalLM(config).save_pretrained(folder)  # stands for a trained model
    ids = torch.randint(config.vocab_size, (1, length))

    model = AutoModelForCausalLM.from_pretrained(folder)
    differences = {}
    with torch.no_grad():
        expected = model(ids).logits
        for name, quantization in configurations().items():
            small = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
            replaced = sum(type(module) is torch.nn.Linear for module in model.modules()) - sum(
                type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor
                for module in small.modules()
            )
            logits = small(ids).logits
            differences[name] = ((logits - expected).square().mean() / expected.square().mean()).sqrt().item()
            generated = small.generate(ids[:, :8], max_new_tokens=8, do_sample=False)
            print(
                f"{name}: {replaced} linear layers have weights of 8 bits; logits differ by {differences[name]:.2%} "
                f"(relative RMS); it generates {generated.shape[1] - 8} tokens"
            )
    return differences


if __name__ == "__main__":
    main(*sys.argv[1:2])
