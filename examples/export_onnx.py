"""An encoder as an ONNX file, run by onnxruntime: python examples/export_onnx.py [checkpoint] [file]

Without a checkpoint a small untrained hybrid shows the way. Needs the extra: pip install 'frankenstein_hf[export]'.
"""

import sys

import torch
from transformers import AutoModel

import frankenstein_hf as fhf


def load(checkpoint: str | None) -> torch.nn.Module:
    """The stack of a checkpoint, whose last hidden states are token embeddings; any head can be exported as well."""
    if checkpoint is not None:
        return AutoModel.from_pretrained(checkpoint)
    config = fhf.FrankensteinConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, layer_pattern=["mamba", "standard"]
    )
    return fhf.FrankensteinModel(config)


def embed(session, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Sentence embeddings [B, D]: the mean over real tokens."""
    inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
    (hidden_states,) = map(torch.from_numpy, session.run(["last_hidden_state"], inputs))
    weights = attention_mask[..., None]
    return (hidden_states * weights).sum(1) / weights.sum(1).clamp_min(1)


def main(checkpoint: str | None = None, path: str = "encoder.onnx") -> None:
    model = load(checkpoint).eval()
    session = fhf.onnx_session(fhf.export_onnx(model, path))  # the file has been compared with the model by now

    # any batch and any length, with pads wherever they are
    input_ids = torch.randint(model.config.vocab_size, (3, 50))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, 30:] = 0
    attention_mask[1, :10] = 0
    embeddings = embed(session, input_ids, attention_mask)

    with torch.no_grad():
        hidden_states = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    weights = attention_mask[..., None]
    expected = (hidden_states * weights).sum(1) / weights.sum(1)
    difference = (embeddings - expected).abs().max() / expected.abs().max()
    print(f"{path}: embeddings {tuple(embeddings.shape)}, {difference:.1e} from the model's")


if __name__ == "__main__":
    main(*sys.argv[1:3])
