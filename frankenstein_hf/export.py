"""Models as graphs for other runtimes: encoders as ONNX files, the decoding step as a program of `torch.export`.

Shapes: B batch, T tokens, S tokens seen so far, V vocabulary.

Batch and length stay dynamic, pads are honoured wherever they are. What cannot be traced says so, with the layer's
mixer; and nothing is returned that has not been run against the model at several sizes.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import DynamicCache

from .modeling.cache import TAIL, MixerKVLayer

TOLERANCE = 1e-4  # of the largest output, for the file against the model
LENGTHS = (1, 5, 70)  # tokens the file is tried at
INPUTS = ("input_ids", "attention_mask")
ONNX_LIMIT = 2**31 - 2**24  # bytes one protobuf file can hold, less what the graph takes


class Encoder(nn.Module):
    """A model of the family as a function of ids and mask alone: (input_ids [B, T], attention_mask [B, T]) -> tensors.

    Args:
        model: Any head, or the stack without one.

    Attributes:
        names: What `forward` returns: "logits", "start_logits" and "end_logits", or "last_hidden_state".
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            output = self._run(*_example(model, 2, 3))
        wanted = ("logits", "start_logits", "end_logits", "last_hidden_state")
        self.names = [name for name in wanted if isinstance(output.get(name), Tensor)]

    def _run(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        options = {"use_cache": False} if getattr(self.model, "is_causal", False) else {}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **options)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """The tensors called `names`."""
        output = self._run(input_ids, attention_mask)
        return tuple(output[name] for name in self.names)


def export_onnx(model: nn.Module, path: str | os.PathLike) -> Path:
    """Write a model as an ONNX file with dynamic batch and length, and run the file against the model.

    Inputs are `input_ids` and `attention_mask`, int64 [batch, tokens]; outputs `logits`, `start_logits` and
    `end_logits`, or `last_hidden_state`, whichever the head has. Recurrent mixers become `Scan` nodes over chunks of
    32 tokens, windows stay as cheap as their width. Weights above 2 GB go to a file `<name>.data` beside it.

    Args:
        model: On the CPU, any head or the stack without one. It is exported in eval mode.
        path: The file to write; it appears when everything has been checked.

    Returns:
        `path`.

    Raises:
        ImportError: The extra `export` is missing.
        ValueError: A mixer that cannot be traced; the message names the layer.
        RuntimeError: The file gives other results than the model.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ImportError(f"export_onnx needs {', '.join(missing)}: pip install 'frankenstein_hf[export]'")
    _check_model(model)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _in_eval(model), torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx.") as folder:
        encoder = Encoder(model)
        program = torch.onnx.export(
            encoder,
            _example(model, 3, 21),
            dynamo=True,
            input_names=INPUTS,
            output_names=encoder.names,
            dynamic_shapes=tuple({0: "batch", 1: "tokens"} for _ in INPUTS),
            verbose=False,
        )
        assert program is not None
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        program.save(str(Path(folder, path.name)), external_data=size > ONNX_LIMIT)
        _check_onnx(encoder, Path(folder, path.name))
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):  # the graph last
            os.replace(file, path.parent / file.name)
    return path


def onnx_session(path: str | os.PathLike) -> Any:
    """An onnxruntime session for a file of `export_onnx`, on the CPU, with as many threads as torch has here."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _check_onnx(encoder: Encoder, path: Path) -> None:
    session = onnx_session(path)
    for batch, length in zip((1, 2, 3), LENGTHS):
        inputs = _example(encoder.model, batch, length)
        outputs = session.run(encoder.names, {name: x.numpy() for name, x in zip(INPUTS, inputs)})
        for name, actual, expected in zip(encoder.names, outputs, encoder(*inputs)):
            _check_equal(f"The ONNX file's {name}", torch.from_numpy(actual), expected, inputs[1])


def _check_equal(what: str, actual: Tensor, expected: Tensor, mask: Tensor) -> None:
    if expected.shape[:2] == mask.shape:  # at pads anything finite may stand
        actual, expected = actual[mask.bool()], expected[mask.bool()]
    difference = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    if actual.shape != expected.shape or not difference <= TOLERANCE:
        raise RuntimeError(
            f"{what} for {mask.shape[0]} sequences of {mask.shape[1]} tokens differ from the model's by "
            f"{difference:.1e} of the largest, more than {TOLERANCE:.0e}. Nothing was written."
        )


# ---------------------------------------------------------------------- the decoding step


class DecodingStep(nn.Module):
    """One token of a causal model as a function of tensors: the cache goes in and comes out by name.

    Names are "layers.<i>.<name>", in the order of the layers. Keys, values and other streams that grow have time on
    their last axis but one; everything else has a fixed size. The batch is the first axis of all.

    Args:
        model: A `FrankensteinForCausalLM`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict]:
        """Ids [B, 1], mask [B, S + 1] and the cache of S tokens -> logits [B, V] and the cache of S + 1."""
        layers = decoding_cache(self.model)
        keep = attention_mask[:, :-1].bool()
        for i, layer in enumerate(layers.layers):
            prefix = f"layers.{i}."
            own = {name.removeprefix(prefix): x for name, x in cache.items() if name.startswith(prefix)}
            layer.load_tensors(own, keep)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, cache=layers, return_dict=True)
        return output.logits[:, -1], cache_tensors(output.cache)


def decoding_cache(model: Any) -> Any:
    """An empty cache to read a prompt into, whose rings have the size of their windows from the first token on."""
    cache: Any = DynamicCache(config=model.config)
    for layer in cache.layers:
        getattr(layer, "tail", layer).num_places = sys.maxsize
    return cache


def cache_tensors(cache: Any) -> dict[str, Tensor]:
    """What a `decoding_cache` holds, as `DecodingStep` takes it."""
    return {
        f"layers.{i}.{name}": x for i, layer in enumerate(cache.layers) for name, x in layer.named_tensors().items()
    }


def export_decoding_step(model: Any) -> ExportedProgram:
    """`DecodingStep` of a causal model as a program with dynamic batch and past, checked against the model.

    Prompts are read by the model itself into a `decoding_cache`, whose `cache_tensors` begin the loop
    `logits, cache = program.module()(ids, mask, cache)`.

    Raises:
        ValueError: A mixer that cannot be traced; the message names the layer.
        RuntimeError: The program gives other results than the model.
    """
    _check_model(model)
    with _in_eval(model), torch.no_grad():
        ids, mask = _example(model, 2, 21)
        cache = _begun(model, ids[:, :20], mask[:, :20])
        program = torch.export.export(
            DecodingStep(model),
            (ids[:, 20:], mask, cache),
            dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, step_shapes(model)),
            strict=False,
        )
        step = program.module()
        for batch, length in ((1, 4), (2, 40)):
            ids, mask = _example(model, batch, length)
            expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            start = length - 2
            cache = _begun(model, ids[:, :start], mask[:, :start])
            for t in (start, start + 1):
                logits, cache = step(ids[:, t : t + 1], mask[:, : t + 1], cache)
                _check_equal("The exported step's logits", logits, expected[:, t], mask)
    return program


def _begun(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return cache_tensors(model(input_ids=ids, attention_mask=mask, cache=decoding_cache(model)).cache)


def step_shapes(model: Any) -> dict[str, dict[int, Any]]:
    """Which axes of the cache's tensors are dynamic, as `dynamic_shapes` says it."""
    ids, mask = _example(model, 2, 3)
    with _in_eval(model), torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, cache=decoding_cache(model)).cache
    shapes: dict[str, dict[int, Any]] = {}
    for i, layer in enumerate(cache.layers):
        for name, x in layer.named_tensors().items():
            grows = isinstance(layer, MixerKVLayer) and not name.startswith(TAIL)
            shapes[f"layers.{i}.{name}"] = {0: Dim.DYNAMIC} | ({x.dim() - 2: Dim.DYNAMIC} if grows else {})
    return shapes


# ---------------------------------------------------------------------- examples and modes


def _check_model(model: Any) -> None:
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"Models are exported from the CPU in float32, this one is {parameter.dtype} on {str(parameter.device)!r}: "
            "export model.to('cpu', torch.float32)."
        )


def _example(model: Any, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids and a mask [B, T] with pads at the left of the first row, inside the last, at the right between."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    if batch > 1 and length > 3:
        mask[-1, length // 2] = 0
    if batch > 2:
        mask[1, length - length // 4 :] = 0
    return ids, mask


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
