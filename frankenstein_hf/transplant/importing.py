"""`from_transformers`: a model of another family as one of this, with other mixers in some layers if asked for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.keys import read_dtype
from .host import HOSTS, Fused, Host
from .report import LayerReport, TransferReport, remember
from .transferring import Target, read_change, target_of
from .weights import FileWeights, ModelWeights, Weights, is_former, place

INITS = ("transfer", "fresh", "calibrated")


def from_transformers(
    model_or_path: Any,
    *,
    layer_pattern: Any = None,
    mixer_params: Mapping[str, Mapping[str, Any]] | None = None,
    init: str = "transfer",
    calibration: Any = None,
    dtype: torch.dtype | str | None = None,
) -> Any:
    """A model of transformers' own families as a model of this one.

    Without `layer_pattern` it is the same function. Weights are copied one at a time, from a checkpoint shard by
    shard, so that beside the new model no second one is in memory; nothing is loaded before all has been checked.

    Args:
        model_or_path: A model, a folder with safetensors files, or a name of the Hub.
        layer_pattern: Mixers for all layers, as one name or a list with one for every layer; or a dict of those that
            change, by layer or by a range such as "5-8", ends included. None: the host's own.
        mixer_params: Parameters of the new mixers, by name.
        init: What the changed layers begin with: what has a meaning for them of the attention they replace
            ("transfer"), or nothing of it ("fresh").
        calibration: Batches for init="calibrated".
        dtype: Of the new model; the host's by default.

    Returns:
        The model in eval mode, with the head of the host; `transfer_report` says where its weights come from.

    Raises:
        ValueError: A family, an option, a pattern or a checkpoint that cannot be converted; the message names the key
            that stands in the way.
    """
    if init not in INITS:
        raise ValueError(f"init={init!r} must be one of {', '.join(map(repr, INITS))}.")
    if init == "calibrated" or calibration is not None:
        raise ValueError("init='calibrated' and calibration= are not built yet: use init='transfer'.")
    host_config, folder = _config_of(model_or_path)
    host = HOSTS[host_config.model_type]
    values = host.read_config(host_config)
    head = _head(host, model_or_path, host_config)
    own = FrankensteinConfig(**values)
    change = read_change(own, layer_pattern, mixer_params)
    config = FrankensteinConfig(**values | change.values) if change.layers else own
    weights: Weights = ModelWeights(model_or_path) if folder is None else FileWeights(folder)
    _check_tokenizer(folder, config)
    wanted = read_dtype("dtype", dtype)
    wanted_dtype = weights.dtype if wanted is None else getattr(torch, wanted)
    with torch.device("meta"):
        model = _class(head)._from_config(config, dtype=wanted_dtype)
        as_host = _class(head)._from_config(own, dtype=wanted_dtype) if change.layers else model
    moves = _plan(host, as_host, weights)
    takes_over = change.layers if init == "transfer" else []
    targets = _targets(own, config, change.layers, takes_over, moves, model, as_host)
    _load(model, host, moves, targets, weights, as_host)
    derived = {layer: _begin(model, layer) for layer in takes_over}
    _generation(model, model_or_path, folder)
    layers = [_report(model, i, targets, derived.get(i, [])) for i in range(config.num_hidden_layers)]
    remember(model, TransferReport(host.model_type, layers))
    return model.eval()


# ---------------------------------------------------------------------- what is given


def _config_of(model_or_path: Any) -> tuple[Any, Path | None]:
    """The host's configuration, and the folder its files lie in if it is no model."""
    if isinstance(model_or_path, nn.Module):
        config = getattr(model_or_path, "config", None)
        if config is None:
            raise ValueError(f"from_transformers takes a model of transformers, got {type(model_or_path).__name__}.")
        return config, None
    from transformers import AutoConfig

    folder = Path(model_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.json"]
        folder = Path(snapshot_download(str(model_or_path), allow_patterns=patterns))
    return AutoConfig.from_pretrained(folder), folder


def _head(host: Host, model_or_path: Any, config: Any) -> str:
    """Our class for the host's: the model's own, or what the checkpoint says it was saved from."""
    if isinstance(model_or_path, nn.Module):
        given = type(model_or_path).__name__
    else:
        given = (config.architectures or [""])[0]
    if given not in host.heads:
        raise ValueError(
            f"architectures={given!r} stands in the way: of {host.model_type!r} these can be converted: "
            f"{', '.join(host.heads)}."
        )
    return host.heads[given]


def _class(name: str) -> Any:
    import frankenstein_hf

    return getattr(frankenstein_hf, name)


def _check_tokenizer(folder: Path | None, config: FrankensteinConfig) -> None:
    """Refuse a checkpoint whose tokenizer has tokens that the embedding has no row for."""
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return
    from tokenizers import Tokenizer

    largest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(
            f"The tokenizer in {folder} has the token id {largest}, but vocab_size={config.vocab_size} of the host has "
            "no embedding for it. Load the host with its own class, call resize_token_embeddings, and pass the model."
        )


def _generation(model: nn.Module, model_or_path: Any, folder: Path | None) -> None:
    """Let `generate` do what the host's does by default."""
    if not hasattr(model, "generation_config"):
        return
    from transformers import GenerationConfig

    if folder is None:
        settings = getattr(model_or_path, "generation_config", None)
    else:
        exists = (folder / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(folder) if exists else None
    if settings is not None:
        model.generation_config = GenerationConfig.from_dict(settings.to_dict())  # type: ignore[assignment]


# ---------------------------------------------------------------------- from names to names


def table_entry(host: Host, module: str, prefix: str) -> tuple[Fused, str]:
    """What the host's module is here, with a star for the layer's number, and that number ("" without one).

    Raises:
        KeyError: The table has no place for it.
    """
    if module in host.head_modules:
        return Fused((host.head_modules[module],)), ""
    parts = module.removeprefix(f"{prefix}.").split(".")
    number = next((part for part in parts if part.isdigit()), "")
    ours = host.modules[".".join("*" if part.isdigit() else part for part in parts)]
    fused = ours if isinstance(ours, Fused) else Fused((ours,))
    return replace(fused, parts=tuple(f"model.{part}" for part in fused.parts)), number


def our_names(host: Host, name: str, prefix: str) -> Fused | None:
    """Our tensors that the host's tensor `name` holds; None where the table has no place for it.

    Args:
        host: Whose table.
        name: Of a weight or bias, in a model with or without a head.
        prefix: Of the stack in models of the host with a head.
    """
    module, _, leaf = name.rpartition(".")
    try:
        fused, number = table_entry(host, module, prefix)
    except KeyError:
        return None
    return replace(fused, parts=tuple(f"{part.replace('*', number)}.{leaf}" for part in fused.parts))


def stack_prefix(host: Host) -> str:
    """What names of the host's stack begin with in models with a head."""
    return host.model_class(next(iter(host.heads))).base_model_prefix


def _plan(host: Host, model: Any, weights: Weights) -> dict[str, Fused]:
    """Which tensors of the model every tensor of the host fills.

    Raises:
        ValueError: A tensor without a place, a place without a tensor, or shapes that disagree.
    """
    prefix = stack_prefix(host)
    bare = model.base_model is model
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys)
    moves: dict[str, Fused] = {}
    unknown, wrong = [], []
    for name, shape in weights.shapes.items():
        if is_former(name):
            continue
        fused = our_names(host, name, prefix)
        if fused is None:
            unknown.append(name)
            continue
        ours = tuple(part.removeprefix("model.") for part in fused.parts) if bare else fused.parts
        if bare and not any(part in expected for part in ours):
            continue  # the head of a checkpoint that is read without it
        if all(part in tied for part in ours):
            continue  # written beside the weight it shares
        if missing := [part for part in ours if part not in expected]:
            unknown.append(f"{name} (for {', '.join(missing)})")
            continue
        rows = sum(expected[part][0] for part in ours)
        if shape != (rows, *expected[ours[0]][1:]):
            wrong.append(f"{name} ({list(shape)} saved, {[rows, *expected[ours[0]][1:]]} built)")
        moves[name] = replace(fused, parts=ours)
    filled = {part for fused in moves.values() for part in fused.parts}
    missing = sorted(set(expected) - filled - tied - set(host.zeros))
    if unknown or wrong or missing:
        raise ValueError(
            f"The weights do not belong to their configuration ({host.model_type!r}): without a place "
            f"{sorted(unknown) or 'nothing'}, of other shapes {wrong or 'nothing'}, missing {missing or 'nothing'}. "
            "Nothing was loaded; check the config.json beside the weights."
        )
    return moves


def _layer_of(name: str) -> int | None:
    """The layer whose mixer a tensor of ours belongs to, if it does to one."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.mixer\.", name)
    return int(found[1]) if found else None


def _targets(
    own: FrankensteinConfig,
    config: FrankensteinConfig,
    changed: list[int],
    takes_over: list[int],
    moves: Mapping[str, Fused],
    model: Any,
    as_host: Any,
) -> dict[str, Target | None]:
    """Where every tensor of the model as the host has it goes in the model asked for."""

    def target(part: str) -> Target | None:
        if (layer := _layer_of(part)) not in changed:
            return Target(part)
        return target_of(own, config, part, rows[part], shapes) if layer in takes_over else None

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rows = {name: tensor.shape[0] for name, tensor in as_host.state_dict().items()}
    return {part: target(part) for fused in moves.values() for part in fused.parts}


def _load(
    model: Any,
    host: Host,
    moves: Mapping[str, Fused],
    targets: Mapping[str, Target | None],
    weights: Weights,
    as_host: Any,
) -> None:
    """Fill the model, one tensor of the host at a time; what none fills is initialised as in a new model."""
    heads = model.config.num_attention_heads
    rows = {name: tensor.shape[0] for name, tensor in as_host.state_dict().items()}
    for name, tensor in weights:
        if name not in moves:
            continue
        sizes = [rows[part] for part in moves[name].parts]
        for part, piece in zip(moves[name].parts, parted(tensor, moves[name], sizes, heads), strict=True):
            if (target := targets[part]) is not None:
                target.fill(place(model, target.name), piece)
    filled = {target.name for target in targets.values() if target is not None}
    tied = set(model.all_tied_weights_keys)
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        if name in tied:
            continue
        tensor = place(model, name)
        if name in host.zeros and name not in filled:
            tensor.zero_()
        if name in filled or name in host.zeros:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights()


@torch.no_grad()
def _begin(model: Any, layer: int) -> list[str]:
    """Let a changed layer begin near the one it replaces; names of what was set."""
    return model.base_model.layers[layer].mixer.begin_as_attention()


def _report(model: Any, layer: int, targets: Mapping[str, Target | None], derived: list[str]) -> LayerReport:
    mixer = model.base_model.layers[layer].mixer
    prefix = next(name for name, module in model.named_modules() if module is mixer) + "."
    own = {name.removeprefix(prefix): target for name, target in targets.items() if _layer_of(name) == layer}
    copied = {target.name.removeprefix(prefix) for target in own.values() if target is not None}
    rest = set(mixer.state_dict()) - copied - set(derived)
    return LayerReport(
        layer,
        model.config.mixer_names[layer],
        copied=sorted(copied - set(derived)),
        derived=sorted(derived),
        new=sorted(rest),
        dropped=sorted(name for name, target in own.items() if target is None),
    )


def parted(tensor: Tensor, fused: Fused, rows: list[int], heads: int) -> Sequence[Tensor]:
    """The host's tensor as the tensors it holds, of so many rows each."""
    if not fused.by_heads:
        return tensor.split(rows)
    by_heads = tensor.unflatten(0, (heads, len(rows), -1))
    return [part.flatten(0, 1) for part in by_heads.unbind(1)]


def joined(parts: Sequence[Tensor], fused: Fused, heads: int) -> Tensor:
    """The other way; a new tensor."""
    if not fused.by_heads:
        return torch.cat(list(parts))
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)
