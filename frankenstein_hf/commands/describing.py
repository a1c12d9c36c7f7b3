"""What a recipe or a trained model consists of."""

import io
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from .. import recipes
from ..cache_sizes import cache_report
from ..configuration.configuration_frankenstein import FrankensteinConfig
from ..configuration.registries import MIXERS
from ..modeling.census import parameter_census
from ..optim import describe_groups
from ..recipes.loading import ENDINGS, NOWHERE
from ..training.failures import readable

LENGTHS = (1024, 32768)


@dataclass
class Description:
    """What a model consists of; `str()` is a page."""

    values: dict[str, Any]
    groups: str

    def __str__(self) -> str:
        values = self.values
        lines = [f"{values['class']}, vocabulary of {values['vocab_size']:,}", "", "layers:"]
        lines += [f"  {number:>3}  {name}" for number, name in enumerate(values["layers"])]
        lines += ["", "parameters:"]
        lines += [f"  {part:<24} {count:>14,}" for part, count in values["parameters"].items()]
        if values["decode_state"]:
            lines += ["", "decode state of one sequence:"]
            lines += [f"  {length:>7} tokens {size:>14,} bytes" for length, size in values["decode_state"].items()]
        lines += ["", "optimizer groups:", *(f"  {line}" for line in self.groups.splitlines())]
        lines += ["", "references:", *(f"  {name}: {words}" for name, words in values["references"].items())]
        return "\n".join(lines)


def description(what: str, settings: Iterable[str], folders: Sequence[Path]) -> Description:
    """Describe a recipe (a file, presets, the folder of a run) or the model in a folder or on the Hub."""
    optimizer: dict[str, Any] = {"name": "adamw"}
    if _is_model(what, folders):
        from transformers import AutoModel, AutoModelForCausalLM

        config = readable(what, lambda: AutoConfig.from_pretrained(what))
        causal = any("CausalLM" in name for name in config.architectures or ())
        auto: Any = AutoModelForCausalLM if causal else AutoModel
    else:
        read = recipes.load(what, settings, folders)
        run = recipes.validate(read.with_settings({"training": {"output_dir": NOWHERE}}, "describe"))
        optimizer = dict(read.values.get("optimizer", optimizer))
        auto = run.auto_class
        config = run.pretrained_config if run.model_args.model_name_or_path else run._config(run.model_args.vocab_size)
    with torch.device("meta"):
        model = auto.from_config(config)
    parts = {"all": sum(parameter.numel() for parameter in model.parameters())}
    if isinstance(config, FrankensteinConfig):
        parts |= {part.name: part.parameters for part in parameter_census(model).parts}
    layers = list(getattr(config, "mixer_names", [])) or [config.model_type] * config.num_hidden_layers
    state = {}
    if isinstance(config, FrankensteinConfig) and getattr(model, "is_causal", False):
        reports = [cache_report(model, length, quiet=True) for length in LENGTHS]
        state = {report.length: report.floats * report.bytes_per_float for report in reports}
    stabilizers, groups = optimizer.pop("stabilizers", None), optimizer.pop("groups", None)
    name = optimizer.pop("name")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in optimizer.items()}
    with redirect_stdout(io.StringIO()):
        described = describe_groups(model, name, groups=groups, stabilizers=stabilizers, **options)
    values = {
        "class": type(model).__name__,
        "vocab_size": config.vocab_size,
        "layers": layers,
        "parameters": parts,
        "decode_state": state,
        "references": {name: MIXERS.get(name).reference for name in dict.fromkeys(layers) if name in MIXERS},
    }
    return Description(values, described)


def _is_model(what: str, folders: Sequence[Path]) -> bool:
    """Whether `what` names a model rather than a recipe."""
    if what.endswith(ENDINGS) or what.startswith("hub:"):
        return False
    return (Path(what) / "config.json").is_file() or ("/" in what and what not in recipes.presets(folders))
