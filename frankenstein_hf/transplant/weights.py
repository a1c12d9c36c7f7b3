"""Where weights are read from, one at a time: a model, wherever it keeps them, or the files of a checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Buffers that old checkpoints hold and no model reads.
_FORMER = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")


class ModelWeights:
    """The weights of a model in memory, or of one that accelerate has moved to another device or to disk.

    Iterating gives every name and tensor, one in memory at a time.

    Attributes:
        shapes: Of every tensor, by name.
        dtype: Of the first floating-point tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        state = model.state_dict(keep_vars=True)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from accelerate.utils import align_module_device

        for prefix, module in self._model.named_modules():
            with align_module_device(module):
                own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
                for name, tensor in own.items():
                    key = f"{prefix}.{name}" if prefix else name
                    if key in self.shapes:
                        yield key, tensor.detach()


class FileWeights:
    """The safetensors files of a checkpoint, one shard open at a time; otherwise as `ModelWeights`.

    Raises:
        ValueError: The folder has none, or the index names a file that is not there.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        self._files = [folder / name for name in names]
        if missing := [path.name for path in self._files if not path.is_file()]:
            raise ValueError(
                f"{folder} has no {', '.join(missing)}. Weights are read from safetensors files; a checkpoint in "
                "another format can be loaded with its own class, and the model passed instead of the path."
            )
        self.shapes: dict[str, tuple[int, ...]] = {}
        dtypes = []
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (no dict)
                    view = file.get_slice(name)
                    self.shapes[name] = tuple(view.get_shape())
                    dtypes.append(_DTYPES.get(view.get_dtype()))
        self.dtype = next((dtype for dtype in dtypes if dtype is not None), torch.float32)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


Weights = ModelWeights | FileWeights
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def is_former(name: str) -> bool:
    """Whether a name is that of a buffer which old versions of transformers wrote and no version reads."""
    return name.endswith(_FORMER)


def place(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer `name` of a model built without storage; given storage now if it has none."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = module._parameters.get(leaf, module._buffers.get(leaf))
    assert old is not None
    if old.device.type != "meta":
        return old.detach()
    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = new
    return new
