"""Bringing the files of the Frankenstein Transformer toolkit: a recipe, and a table of what became of every key.

A key that is absent there is not absent here: experts, ternary weights and a norm of its own are on by default in the
toolkit. Such defaults are written down and marked. What has no counterpart is "impossible" if it would change the model
or the training, and "dropped" if it is nothing a training library decides.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..training.failures import BadInput
from .checking import installed_schema, problems
from .reading import Document, read_text
from .toolkit import (
    DEFAULTS,
    DROPPED,
    FLAT,
    GATED,
    GROUP_SUFFIXES,
    OPTIMIZER_NAMES,
    OTHER_FUNCTIONS,
    ROLES,
    SAME,
    SBERT,
    SCHEDULERS,
    SUFFIXES,
    SWITCHES,
    TASKS,
)

FATES = ("kept", "renamed", "explicit", "dropped", "impossible")


class Row(NamedTuple):
    """What became of one key: its value, its fate, the key it has now, and why."""

    key: str
    value: Any
    fate: str
    ours: str = ""
    note: str = ""


@dataclass
class Imported:
    """The recipe, and a row for every key."""

    recipe: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def lost(self) -> list[Row]:
        """What the recipe cannot do."""
        return [row for row in self.rows if row.fate == "impossible"]

    def table(self) -> str:
        """One line a key."""
        lines = []
        for row in sorted(self.rows, key=lambda row: FATES.index(row.fate)):
            value = str(row.value) if len(str(row.value)) <= 40 else f"{str(row.value)[:37]}…"
            arrow = f" → {row.ours}" if row.ours else ""
            lines.append(f"{row.fate:<10} {row.key}: {value}{arrow}" + (f"  ({row.note})" if row.note else ""))
        return "\n".join(lines)

    def set(self, ours: str, value: Any) -> None:
        """Write a value into the recipe at "section.key"."""
        place = self.recipe
        *way, last = ours.split(".")
        for name in way:
            place = place.setdefault(name, {})
        place[last] = value


def import_toolkit(text: str, name: str) -> Imported:
    """Read a file of the toolkit (YAML, or the one-line JSON of its dashAI plugin) and say what becomes of every key.

    Args:
        text: Its content.
        name: What messages call it.

    Raises:
        BadInput: It is no file of the toolkit.
    """
    values = read_text(text, name).values
    if "training" not in values or not ({"model", "base_model"} & values.keys()):
        raise BadInput(f"{name} has no 'training' with a 'model' or 'base_model', so it is no file of the toolkit.")
    return _Importer(values).imported()


class _Importer:
    def __init__(self, values: dict[str, Any]) -> None:
        self.given = dict(_leaves(_nested(values)))
        self.made = Imported()
        self.parts = installed_schema()["x-parts"]

    def imported(self) -> Imported:
        explicit = {key: value for key, value in DEFAULTS.items() if key not in self.given}
        if "base_model" in self.given:
            explicit = {key: value for key, value in explicit.items() if not key.startswith("model.")}
        elif "model.ffn.hidden_size" not in self.given and isinstance(self.given.get("model.dims.hidden_size"), int):
            explicit["model.ffn.hidden_size"] = 2 * self.given["model.dims.hidden_size"]
        if self.given.get("training.task") != "mlm":
            explicit.pop("training.mlm_probability", None)
        for key, value in [*self.given.items(), *explicit.items()]:
            if value is None:
                self._row(key, value, "dropped", note="null is the default")
                continue
            self._key(key, value)
            if key in explicit:
                row = self.made.rows[-1]
                fate = "impossible" if row.fate == "impossible" else "explicit"
                note = "the toolkit's default" + (f"; {row.note}" if row.note else "")
                self.made.rows[-1] = row._replace(fate=fate, note=note)
        self._end()
        return self.made

    # ------------------------------------------------------------------ one key

    def _row(self, key: str, value: Any, fate: str, ours: str = "", note: str = "") -> None:
        self.made.rows.append(Row(key, value, fate, ours, note))

    def _take(self, key: str, value: Any, ours: str, as_: Any = None, note: str = "") -> None:
        """Write it at `ours`, as another value if `as_` is given; impossible if the schema refuses it there."""
        new = value if as_ is None else as_
        found = problems(Document({"task": self._task(), **_at(ours, new)}))
        if found := [line for line in found if "is missing" not in line]:
            self._row(key, value, "impossible", note=found[0].partition(": ")[2])
            return
        self.made.set(ours, new)
        same = key.rpartition(".")[2] == ours.rpartition(".")[2] and new == value
        self._row(key, value, "kept" if same else "renamed", ours, note)

    def _task(self) -> str:
        return TASKS.get(self.given.get("training.task", "mlm"), "masked_lm")

    def _key(self, key: str, value: Any) -> None:
        for pattern, why in DROPPED.items():
            if re.fullmatch(pattern, key):
                return self._row(key, value, "dropped", note=why)
        for switch, what in SWITCHES.items():
            if key.startswith(f"{switch}."):
                return self._switch(key, value, switch, what)
        for pattern, rule in RULES.items():
            if found := re.fullmatch(pattern, key):
                return rule(self, key, value, *found.groups())
        if key in SAME:
            return self._take(key, value, SAME[key])
        if key.startswith(("image", "vision", "audio")):
            return self._row(key, value, "impossible", note="needs the vision or audio classes")
        return self._row(key, value, "impossible", note="nothing here does it, or no version of the toolkit has it")

    def _switch(self, key: str, value: Any, switch: str, what: str) -> None:
        on = self.given.get(f"{switch}.enabled", DEFAULTS.get(f"{switch}.enabled", False))
        if not on:
            return self._row(key, value, "dropped", note="switched off there, absent here")
        if key == f"{switch}.enabled":
            return self._row(key, value, "impossible", note=f"{what} are not offered by recipes yet")
        return self._row(key, value, "impossible", note=f"belongs to {switch}")

    # ------------------------------------------------------------------ model

    def _class(self, key: str, value: Any) -> None:
        decoder = value == "frankenstein_text_decoder"
        if value == "frankenstein_vit":
            return self._row(key, value, "impossible", note="needs the vision classes")
        if decoder != (self._task() == "causal_lm"):
            return self._row(key, value, "impossible", note=f"contradicts training.task, which makes it {self._task()}")
        return self._row(key, value, "renamed", "task")

    def _mode(self, key: str, value: Any) -> None:
        if (value == "decoder") == (self._task() == "causal_lm"):
            return self._row(key, value, "renamed", "task")
        if self.given.get("model_class") == "frankenstein_text_decoder":
            return self._row(key, value, "dropped", note="the decoder class overrides it there too")
        return self._row(key, value, "impossible", note=f"contradicts training.task, which makes it {self._task()}")

    def _pattern(self, key: str, value: Any) -> None:
        names, notes = [], []
        for name in value if isinstance(value, list) else [value]:
            plain = str(name).removesuffix("_attn")
            if plain in OTHER_FUNCTIONS and plain not in notes:
                notes.append(plain)
            names.append(plain)
        period = next(
            size
            for size in range(1, len(names) + 1)
            if len(names) % size == 0 and names == names[:size] * (len(names) // size)
        )
        words = "; ".join(f"{name}: {OTHER_FUNCTIONS[name]}, so weights do not carry over" for name in notes)
        self._take(key, value, "model.layer_pattern", names[:period], words)

    def _mixer(self, key: str, value: Any, mixer: str, name: str) -> None:
        if mixer == "falcon":
            pattern = [str(part).removesuffix("_attn") for part in self.given.get("model.dims.layer_pattern", ())]
            family = [part for part in self.parts["mixers"] if part.startswith("falcon") and part in pattern]
            for part in family:
                self.made.set(f"model.mixer_params.{part}.{name}", value)
            return self._row(key, value, "renamed", ", ".join(f"model.mixer_params.{part}.{name}" for part in family))
        if (mixer, name) == ("retnet", "heads"):
            if value == self.given.get("model.dims.num_heads"):
                return self._row(key, value, "dropped", note="equals num_heads, which is what it is here")
            return self._row(key, value, "impossible", note="heads of retnet are num_attention_heads here")
        return self._take(key, value, f"model.mixer_params.{mixer.removesuffix('_attn')}.{name}")

    def _partial_ratio(self, key: str, value: Any) -> None:
        if self.given.get("model.norm.type") != "prms_norm":
            return self._row(key, value, "dropped", note="of prms_norm only")
        self.made.set("model.norm", "prms_norm")
        self.made.set("model.norm_params.partial_ratio", value)
        return self._row(key, value, "renamed", "model.norm_params.partial_ratio")

    def _activation(self, key: str, value: Any) -> None:
        form = "gated" if value in GATED else "plain"
        self.made.set("model.feed_forward", form)
        self._take(key, value, "model.hidden_act", GATED.get(value, value), f"feed_forward: {form}")

    def _activation_config(self, key: str, value: Any, name: str) -> None:
        activation = self.given.get("model.ffn.activation", "silu")
        if not name.startswith(f"{activation}_"):
            return self._row(key, value, "dropped", note=f"not of {activation}")
        parameter = name.removeprefix(f"{activation}_")
        model = {"hidden_act": activation, "activation_params": {parameter: value}}
        if found := problems(Document({"model": model})):
            return self._row(key, value, "impossible", note=found[0].partition(": ")[2])
        self.made.set(f"model.activation_params.{parameter}", value)
        return self._row(key, value, "renamed", f"model.activation_params.{parameter}")

    def _positions(self, key: str, value: Any) -> None:
        rotary = value in ("rope", "rotary") if key.endswith("encoding") else value is False
        if rotary:
            return self._row(key, value, "dropped", note="rotary positions are what mixers with positions have")
        return self._row(key, value, "impossible", note="not offered by recipes yet")

    def _residuals(self, key: str, value: Any, name: str) -> None:
        if name == "type":
            return self._take(key, value, "model.residual")
        return self._row(key, value, "impossible", note="say it with model.residual and model.residual_params")

    def _mhc(self, key: str, value: Any, name: str) -> None:
        if not self.given.get("model.mhc.enabled", False):
            return self._row(key, value, "dropped", note="switched off there, absent here")
        if name == "enabled":
            self.made.set("model.residual", "mhc")
            return self._row(key, value, "renamed", "model.residual: mhc")
        ours = f"model.residual_params.{name}"
        model = {"residual": "mhc", "residual_params": {name: value}}
        if found := problems(Document({"model": model})):
            return self._row(key, value, "impossible", note=found[0].partition(": ")[2])
        self.made.set(ours, value)
        return self._row(key, value, "renamed", ours)

    def _off(self, key: str, value: Any) -> None:
        if value is False:
            return self._row(key, value, "dropped", note="switched off there, absent here")
        return self._row(key, value, "impossible", note="not offered by recipes yet")

    def _vocab(self, key: str, value: Any) -> None:
        if "tokenizer.training.vocab_size" in self.given:
            return self._row(key, value, "dropped", note="the tokenizer that is trained decides it")
        if "tokenizer.name_or_path" in self.given:
            return self._row(key, value, "dropped", note="the tokenizer decides it")
        return self._take(key, value, "tokenizer.train.vocab_size")

    # ------------------------------------------------------------------ training

    def _scheduler(self, key: str, value: Any) -> None:
        self._take(key, value, "training.lr_scheduler_type", SCHEDULERS.get(value, value))

    def _share(self, key: str, value: Any) -> None:
        if value == 0:
            return self._row(key, value, "dropped", note="something is always held out here")
        return self._take(key, value, "data.validation_split_percentage", float(value))

    def _amp(self, key: str, value: Any) -> None:
        if not value:
            return self._row(key, value, "dropped", note="fp32 is the default")
        return self._row(key, value, "dropped", note="on a GPU say training.fp16=true; it means nothing on a CPU")

    def _best(self, key: str, value: Any) -> None:
        self.made.set("training.load_best_model_at_end", True)
        self.made.set("training.eval_strategy", "steps")
        note = "one best is kept" if value == 1 else f"one best is kept, not {value}"
        self._row(key, value, "renamed", "training.load_best_model_at_end", note)

    def _context(self, key: str, value: Any) -> None:
        if not value:
            return self._row(key, value, "dropped", note="0 joins nothing; packing: blocks does by default here")
        self.made.set("data.packing", "blocks")
        return self._take(key, value, "data.block_size")

    def _galore(self, key: str, value: Any, name: str) -> None:
        if not self.given.get("training.use_galore", False):
            return self._row(key, value, "dropped", note="switched off there, absent here")
        if self.given.get("training.optimizer.optimizer_class") != "adamw":
            return self._row(key, value, "impossible", note="only AdamW has a GaLore form here: galore_adamw")
        names = {"galore_rank": "rank", "galore_update_interval": "update_proj_gap", "galore_scale": "scale"}
        if name == "use_galore":
            return self._row(key, value, "renamed", "optimizer.name: galore_adamw")
        if name not in names:
            return self._row(key, value, "impossible", note="galore_adamw projects every matrix")
        self.made.set(f"optimizer.{names[name]}", float(value) if name == "galore_scale" else value)
        return self._row(key, value, "renamed", f"optimizer.{names[name]}")

    def _optimizer_name(self) -> Any:
        asked = self.given.get("training.optimizer.optimizer_class")
        if self.given.get("training.use_galore") and asked == "adamw":
            return "galore_adamw"
        return OPTIMIZER_NAMES.get(str(asked), asked)

    def _optimizer(self, key: str, value: Any) -> None:
        self._take(key, value, "optimizer.name", self._optimizer_name())

    def _parameter(self, key: str, value: Any, prefix: str, suffix: str) -> None:
        asked = self.given.get("training.optimizer.optimizer_class")
        if prefix != asked:
            return self._row(key, value, "impossible", note=f"of {prefix}, and the optimizer is {asked}")
        name = self._optimizer_name()
        kind, _, role = suffix.partition("_")
        if kind in GROUP_SUFFIXES and role in ROLES:
            ours = f"groups.{role}.{GROUP_SUFFIXES[kind]}"
            note = "the toolkit's groups embeddings and attention are mostly empty" if role in ROLES[::2] else ""
        elif suffix in ("eps1", "eps2") and name == "adafactor":
            pair = [self.given.get(f"{key[:-1]}{place}") for place in (1, 2)]
            self.made.set(
                "optimizer.eps", [1e-30 if pair[0] is None else pair[0], 1e-3 if pair[1] is None else pair[1]]
            )
            return self._row(key, value, "renamed", "optimizer.eps")
        else:
            ours, note = SUFFIXES.get(suffix, suffix), ""
        new = list(value) if isinstance(value, (list, tuple)) else value
        if isinstance(new, str) and re.fullmatch(r"[\d.]+[eE]?-?\d*", new):
            new = float(new)
        found = problems(Document({"optimizer": {"name": name, **_at(ours, new)}}))
        if found:
            return self._row(key, value, "impossible", note=found[0].partition(": ")[2])
        self.made.set(f"optimizer.{ours}", new)
        return self._row(key, value, "renamed" if ours != suffix else "kept", f"optimizer.{ours}", note)

    def _sbert(self, key: str, value: Any, name: str) -> None:
        if name in SBERT:
            return self._take(key, value, SBERT[name])
        if name == "learning_rate":
            return self._take(key, value, "training.learning_rate")
        if name == "pooling_mode":
            return (
                self._take(key, value, "data.pooling")
                if value in ("mean", "cls")
                else self._row(key, value, "impossible", note="poolings here are mean, cls and last")
            )
        if name == "dataset_type":
            loss = {"paired_similarity": "cosine", "triplets": "triplet", "qa": "multiple_negatives"}.get(value)
            return self._take(key, value, "data.loss", loss)
        if name.startswith("columns."):
            columns = [own for way, own in self.given.items() if way.startswith("training.sbert.columns.")]
            return self._take(key, value, "data.columns", ",".join(map(str, columns)))
        return self._row(key, value, "impossible", note="recipes have no counterpart yet")

    # ------------------------------------------------------------------ tokenizer and data

    def _tokenizer_name(self, key: str, value: Any) -> None:
        self._take(key, value, "tokenizer.from")

    def _algorithm(self, key: str, value: Any) -> None:
        fits = {"algorithm": "bpe", "pre_tokenizer": "bytelevel", "lowercase": False, "strip_accents": False}
        fits |= {"max_token_length": 0}
        if value == fits.get(key.rpartition(".")[2]):
            return self._row(key, value, "kept", note="what is trained here is byte-level BPE")
        return self._row(key, value, "impossible", note="what is trained here is byte-level BPE")

    def _said(self, key: str, value: Any) -> None:
        self._row(key, value, "renamed", "tokenizer", "follows from the other keys")

    def _parquet(self, key: str, value: Any) -> None:
        self._take(key, value, "data.dataset_name", note="a folder of parquet files")

    def _streaming(self, key: str, value: Any) -> None:
        if value:
            return self._row(key, value, "impossible", note="data are read whole; data.max_train_samples limits them")
        return self._row(key, value, "dropped", note="data are read whole")

    def _head(self, key: str, value: Any, name: str) -> None:
        if not self.given.get("model.classification_head.enabled", False):
            return self._row(key, value, "dropped", note="switched off there, absent here")
        if name == "pooling_mode":
            return self._take(key, value, "model.classifier_pooling", {"gap": "mean"}.get(value, value))
        return self._row(key, value, "dropped", note="decided by the task and the labels in the data")

    def _task_key(self, key: str, value: Any) -> None:
        self._take(key, value, "task", TASKS.get(value, value))

    # ------------------------------------------------------------------ all of it

    def _end(self) -> None:
        """What holds only of several keys."""
        recipe = self.made.recipe
        recipe.setdefault("task", self._task())
        layers, pattern = self.given.get("model.dims.num_layers"), recipe.get("model", {}).get("layer_pattern")
        if isinstance(layers, int) and isinstance(pattern, list) and layers % len(pattern):
            self._row("model.dims.num_layers", layers, "impossible", note="is no multiple of the pattern's length")
        for place, row in enumerate(self.made.rows):
            if re.fullmatch(r"optimizer\.groups\.\w+\.lr", row.ours) and 0 < float(row.value) <= 5e-6:
                note = "so low a rate moves no weight by more than some thousandths in thousands of steps"
                self.made.rows[place] = row._replace(note="; ".join(filter(None, (row.note, note))))
        order = ("task", "model", "tokenizer", "data", "objective", "optimizer", "training")
        self.made.recipe = {key: recipe[key] for key in order if key in recipe}


def _at(ours: str, value: Any) -> dict[str, Any]:
    for name in reversed(ours.split(".")):
        value = {name: value}
    return value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with flat keys of version 1.0 at the places they have now."""
    model = values.get("model")
    if not isinstance(model, dict):
        return dict(values)
    new: dict[str, Any] = {}
    for key, value in model.items():
        place = new
        *way, last = (FLAT[key] if key in FLAT and not isinstance(value, dict) else key).split(".")
        for name in way:
            place = place.setdefault(name, {})
        if isinstance(value, dict) and isinstance(place.get(last), dict):
            place[last].update(value)
        else:
            place[last] = value
    return {**values, "model": new}


def _leaves(values: Any, way: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _leaves(value, f"{way}.{name}" if way else str(name))
    else:
        yield way, values


Rule = Callable[..., None]
RULES: dict[str, Rule] = {
    r"model_class": _Importer._class,
    r"base_model": lambda self, key, value: self._take(key, value, "model.from"),
    r"model\.dims\.mode": _Importer._mode,
    r"model\.dims\.vocab_size": _Importer._vocab,
    r"model\.dims\.layer_pattern": _Importer._pattern,
    r"model\.attention\.(\w+)\.(\w+)": _Importer._mixer,
    r"model\.norm\.partial_ratio": _Importer._partial_ratio,
    r"model\.ffn\.activation": _Importer._activation,
    r"model\.ffn\.activation_config\.(\w+)": _Importer._activation_config,
    r"model\.mhc\.(\w+)": _Importer._mhc,
    r"model\.numerics\.\w+": _Importer._off,
    r"model\.(?:positional_encoding|use_hope)": _Importer._positions,
    r"model\.residuals\.(\w+)": _Importer._residuals,
    r"model\.classification_head\.(\w+)": _Importer._head,
    r"training\.task": _Importer._task_key,
    r"training\.scheduler_type": _Importer._scheduler,
    r"training\.test_percentage": _Importer._share,
    r"training\.use_amp": _Importer._amp,
    r"training\.num_best_checkpoints": _Importer._best,
    r"training\.join_temp_data_context_window": _Importer._context,
    r"training\.(use_galore|galore_\w+)": _Importer._galore,
    r"training\.optimizer\.optimizer_class": _Importer._optimizer,
    r"training\.optimizer\.parameters\.(\w+)-(\w+)": _Importer._parameter,
    r"training\.sbert\.([\w.]+)": _Importer._sbert,
    r"training\.local_parquet_dir": _Importer._parquet,
    r"tokenizer\.name_or_path": _Importer._tokenizer_name,
    r"tokenizer\.source": _Importer._said,
    r"tokenizer\.trust_remote_code": _Importer._off,
    r"tokenizer\.training\.(?!vocab_size|save_dir)\w+": _Importer._algorithm,
    r"text_dataset\.streaming": _Importer._streaming,
}  # fmt: skip
