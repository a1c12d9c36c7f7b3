"""Specifications of pluggable parts: what can be asked for, with which parameters, and who computes it.

A component (mixer, norm, feed-forward …) is declared once as a `ComponentSpec`; validation, documentation tables,
command-line help and tests are all derived from it.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from .values import choices_of, describe_range, did_you_mean, param, problem, shown

__all__ = [
    "ComponentSpec",
    "MixerSpec",
    "Params",
    "Registry",
    "describe_range",
    "did_you_mean",
    "param",
]


@dataclass(frozen=True, kw_only=True)
class Params:
    """Base of every component's parameters: frozen, typed, range-checked. Fields are declared with `param`."""

    former_names: ClassVar[Mapping[str, str]] = {}  # of parameters, which old configurations use, by today's

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Annotated type of every parameter, by name."""
        return typing.get_type_hints(cls)

    @classmethod
    def named(cls, values: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """`values` under today's names. Raises ValueError where one parameter is given under two of its names."""
        if not isinstance(values, Mapping):
            raise ValueError(f"Parameters of {owner!r} must be a dict of names and values, got {shown(values)}.")
        for former, name in cls.former_names.items():
            if former in values and name in values:
                raise ValueError(f"{owner!r}: {former!r} and {name!r} are one parameter; give one of them.")
        return {cls.former_names.get(key, key): value for key, value in values.items()}

    @classmethod
    def upgraded(cls, values: Mapping[str, Any], version: str) -> Mapping[str, Any]:
        """`values` of a configuration that an earlier `version` wrote, with what has another default since written out.

        Args:
            values: As written, under any of the names.
            version: Of this library, below today's.
        """
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], owner: str) -> Self:
        """Build from user-written values.

        Args:
            values: Parameter values by name.
            owner: The component's name, for messages.

        Raises:
            ValueError: Unknown name, wrong type, or a value outside its range.
        """
        values = cls.named(values, owner)
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                raise ValueError(f"{owner!r} has no parameter {key!r}" + did_you_mean(key, names))
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{owner!r}: {error}") from None

    def __post_init__(self) -> None:
        hints = self.types()
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata
            name = field.name.rstrip("_")
            choices = choices_of(limits)
            if choices and isinstance(value, str) and value not in choices:
                raise ValueError(f"parameter '{name}'={shown(value)}" + did_you_mean(value, map(str, choices)))
            if words := problem(value, hints[field.name], limits):
                raise ValueError(f"parameter '{name}' must be {words}, got {shown(value)}.")

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        """These parameters made concrete for one model.

        Defaults that depend on the model's size are filled in here; a default the model cannot meet shrinks to the
        largest valid value, an explicitly given impossible value raises.

        Args:
            config: The model's configuration.
            explicit: Names of the parameters the user wrote.
        """
        return self


P = TypeVar("P", bound="ComponentSpec")


@dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """One pluggable part.

    Attributes:
        name: The string a user writes.
        family: Group in listings and documentation.
        summary: One line.
        reference: Paper title and arXiv id, or the library whose convention it follows.
        params: The `Params` class.
        implementation: "module:Class" below the modeling package, imported on first use.
        aliases: What others call it; error messages lead from there to `name`.
        acts_on: What a mixer's spec must have for this to act; where no layer has it, it is refused. Empty: always.
    """

    name: str
    family: str
    summary: str
    reference: str
    params: type[Params] = Params
    implementation: str = ""
    aliases: tuple[str, ...] = ()
    acts_on: str = ""

    @property
    def kind(self) -> str:
        """Which kind of component it is: "mixer", or what its family is called."""
        return self.family


class Chosen(NamedTuple):
    """A component a configuration has chosen, with its parameters."""

    spec: Any
    params: Any


class Round(NamedTuple):
    """Layers that work one after the other; in looped depth some do so more than once.

    Attributes:
        layers: Indices of the layers.
        loop: How often they have been at work before.
        looped: Whether they are those that are repeated.
        offset: What to add to a layer's index for that of the cache layer it uses.
    """

    layers: range
    loop: int
    looped: bool
    offset: int


CACHE_SLOTS = frozenset({"kv", "latent", "ring", "state", "tail", "index"})
GROWING_SLOTS = frozenset({"kv", "latent", "index"})
# What softmax attention is made of, by the names every mixer uses for them.
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class MixerSpec(ComponentSpec):
    """A sequence mixer and what it can do; the contract tests read these capabilities.

    Attributes:
        causal, bidirectional: Modes it supports.
        cache: Slots its decode state consists of (subset of kv, latent, ring, state, tail, index); empty = no cache.
        state_size: `(params, config) -> floats` one sequence keeps in its constant-size slots (a ring counts as full).
        token_size: `(params, config) -> floats` one token adds to the growing slots, on average.
        needs_input_ids: Token ids must be given (not only embeddings).
        takes_residual: Receives the residual stream instead of the normed input, and norms it itself (`Mixer.normed`).
        logits: Of the projections `q_proj` and `k_proj`, whose heads' dot products are the attention scores, those an
            optimizer may rescale to bound the scores; the mixer returns their maxima when asked. Empty: no such scores.
        qk_norm: Takes the model's `qk_norm` and `attention_scale`.
        gradient: "exact", or "surrogate" where the method itself substitutes gradients.
        parameter_free: `(params) -> bool`, true when only the four standard projections are used.
        rotary_width: `(params, config) -> int`, the width its rotary positions are made for.
        reach: `(params) -> int | None`, how many tokens to either side one layer sees at most (None: all), used by
            tests of the bidirectional mode.
        transfer: Projections whose weights mean here what they mean in softmax attention, under the same names: what a
            layer that replaces one of attention takes over (heads of keys and values repeated where there are more).
            What else lets it begin near that layer is `Mixer.begin_as_attention`.
        native_mask: Sees the batch as given and honours any 4-D attention mask.
        small_params: Parameter values at which a dozen tokens meet every border; tests run with them.
    """

    causal: bool = True
    bidirectional: bool = True
    cache: frozenset[str] = frozenset()
    state_size: Callable[[Any, Any], int] = lambda params, config: 0
    token_size: Callable[[Any, Any], float] = lambda params, config: 0
    needs_input_ids: bool = False
    takes_residual: bool = False
    logits: tuple[str, ...] = ()
    qk_norm: bool = False
    gradient: str = "exact"
    parameter_free: Callable[[Any], bool] = lambda params: False
    reach: Callable[[Any], int | None] = lambda params: None
    rotary_width: Callable[[Any, Any], int] = lambda params, config: config.head_dim
    transfer: tuple[str, ...] = ()
    native_mask: bool = False
    small_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := set(self.cache) - CACHE_SLOTS:
            raise ValueError(f"Mixer {self.name!r}: unknown cache slots {unknown}; allowed: {sorted(CACHE_SLOTS)}.")
        if self.gradient not in ("exact", "surrogate"):
            raise ValueError(f"Mixer {self.name!r}: gradient must be 'exact' or 'surrogate', got {self.gradient!r}.")

    @property
    def kind(self) -> str:
        """A mixer's family is a group of mixers."""
        return "mixer"

    @property
    def grows(self) -> bool:
        """Whether the decode state grows with the number of tokens."""
        return bool(self.cache & GROWING_SLOTS)


NAME = re.compile(r"[a-z][a-z0-9_]*")
# `attn_implementation` chooses these; a mixer called like one could never be told from it
BACKENDS = frozenset({"eager", "sdpa", "flex_attention", "triton", "paged", "kernels"})


def backend_names() -> frozenset[str]:
    """Names `attn_implementation` knows already, those other code has registered with transformers included."""
    modeling = sys.modules.get("transformers.modeling_utils")  # nobody can have registered one without it
    registered = modeling.ALL_ATTENTION_FUNCTIONS.valid_keys() if modeling is not None else ()
    return BACKENDS.union(registered)


class Registry(Generic[P]):
    """Specs of one kind of component, by name, discovered on first use.

    Args:
        kind: What the components are called in messages, e.g. "mixer".
        discover: Returns the built-in specs.
        reserved: Returns names no component may have, because they mean something else where names are read.
    """

    def __init__(
        self,
        kind: str,
        discover: Callable[[], Iterable[P]],
        reserved: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.kind = kind
        self._discover: Callable[[], Iterable[P]] | None = discover
        self._reserved = reserved
        self._specs: dict[str, P] = {}

    def _load(self) -> dict[str, P]:
        if self._discover is not None:
            discover, self._discover = self._discover, None
            for spec in discover():
                self.register(spec)
        return self._specs

    def check_name(self, name: object) -> None:
        """Raise ValueError for a name no component of this kind can have; whether it is taken is another question."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"A {self.kind} cannot be called {shown(name)}: a name consists of lower-case letters, digits and "
                "underscores and begins with a letter."
            )
        if name.startswith("frankenstein_"):
            raise ValueError(
                f"A {self.kind} cannot be called {name!r}: names that begin with 'frankenstein_' are what transformers "
                f"knows our parts by. Call it {name.removeprefix('frankenstein_') or 'something else'!r}."
            )
        if name in self._reserved() or (self._reserved() and name.startswith("flash_attention")):
            raise ValueError(
                f"A {self.kind} cannot be called {name!r}: that is a backend of attn_implementation, and every model "
                "that asks for it would be changed. Choose another name."
            )

    def register(self, spec: P) -> None:
        """Add a spec.

        Raises:
            ValueError: The name is not one a component can have (see `check_name`), or a different spec has it.
        """
        specs = self._load()
        self.check_name(spec.name)
        if specs.setdefault(spec.name, spec) != spec:
            raise ValueError(f"A {self.kind} named {spec.name!r} is registered already; choose another name.")

    def get(self, name: str, others: Iterable[str] = ()) -> P:
        """The spec called `name`. Raises ValueError with the nearest valid name, of `others` that would do included."""
        specs = self._load()
        if not isinstance(name, str) or name not in specs:
            aliases = {alias: spec.name for spec in specs.values() for alias in spec.aliases}
            raise ValueError(f"Unknown {self.kind} {shown(name)}" + did_you_mean(name, {*specs, *others}, aliases))
        return specs[name]

    def names(self, family: str | None = None) -> list[str]:
        """Sorted names, of one family if given. Raises ValueError for an unknown family."""
        specs = self._load().values()
        families = {spec.family for spec in specs}
        if family is not None and family not in families:
            raise ValueError(f"Unknown {self.kind} family {family!r}" + did_you_mean(family, families))
        return sorted(spec.name for spec in specs if family in (None, spec.family))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._load()

    def __iter__(self) -> Iterator[P]:
        return iter(self._load().values())
