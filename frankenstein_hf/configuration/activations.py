"""Specs of activation functions. Names that are not here are looked up in transformers' `ACT2FN`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .component import ComponentSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class SwishParams(Params):
    """Parameters of `swish`."""

    beta: float = param(1.0, "x·σ(βx).")


@dataclass(frozen=True, kw_only=True)
class LeakyReLUParams(Params):
    """Parameters of `leaky_relu`."""

    slope: float = param(0.01, "Slope for x < 0.")


@dataclass(frozen=True, kw_only=True)
class ELUParams(Params):
    """Parameters of `elu` and `celu`."""

    alpha: float = param(1.0, "Where the negative side levels off.", minimum=1e-6)


@dataclass(frozen=True, kw_only=True)
class BReLUParams(Params):
    """Parameters of `brelu`."""

    threshold: float = param(1.0, "Upper bound t of clamp(x, 0, t).", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class AbsReLUParams(Params):
    """Parameters of `abs_relu`."""

    a: float = param(1.0, "x for x ≥ 0, −a·x else; 1 is the absolute value.")


@dataclass(frozen=True, kw_only=True)
class NLReLUParams(Params):
    """Parameters of `nl_relu`."""

    beta: float = param(1.0, "ln(1 + βx) for x ≥ 0.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class HexpoParams(Params):
    """Parameters of `hexpo`."""

    a: float = param(1.0, "Where the positive side levels off.")
    b: float = param(1.0, "How slowly it does.", minimum=1e-6)
    c: float = param(1.0, "Where the negative side levels off.")
    d: float = param(1.0, "How slowly it does.", minimum=1e-6)
    form: str = param("exponential", "`linear` is a·max(0, x) − c·max(0, −x).", choices=("exponential", "linear"))


@dataclass(frozen=True, kw_only=True)
class PTanhParams(Params):
    """Parameters of `ptanh`."""

    a: float = param(0.25, "tanh(x) for x ≥ 0, a·tanh(x) else.")


@dataclass(frozen=True, kw_only=True)
class DisReLUParams(Params):
    """Parameters of `dis_relu`."""

    form: str = param("displaced", "max(x, −δ), or max(0, x − δ) for `shifted`.", choices=("displaced", "shifted"))
    delta: float | None = param(None, "δ; by default 0.05 displaced, 0 shifted.")


@dataclass(frozen=True, kw_only=True)
class HardELiSHParams(Params):
    """Parameters of `hardelish`."""

    hard_sigmoid: str = param(
        "clip", "The sigmoid's stand-in: clamp((x + 1)/2, 0, 1), or relu6(x + 3)/6.", choices=("clip", "relu6")
    )


@dataclass(frozen=True, kw_only=True)
class PReLUParams(Params):
    """Parameters of `prelu`."""

    init: float = param(0.25, "Slope for x < 0 at the start.")


@dataclass(frozen=True, kw_only=True)
class FormParams(Params):
    """Parameters of activations with a second published form."""

    form: str = param(
        "original", "The method's own formula, or the variant of a later toolkit.", choices=("original", "seed")
    )


@dataclass(frozen=True, kw_only=True)
class EELUParams(FormParams):
    """Parameters of `eelu`."""

    noise: float = param(0.0, "In training the positive slope is drawn from N(1, noise²), within [0, 2].", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class PDELUParams(FormParams):
    """Parameters of `pdelu`."""

    t: float = param(0.9, "Deformation of the exponential; 1 is `elu`.", minimum=0.0, maximum=1.0)


RAF_TARGETS = (
    "gelu", "relu", "leaky_relu", "leaky_relu_0.1", "sigmoid", "tanh", "swish", "silu", "identity",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RAFParams(Params):
    """Parameters of `raf`."""

    degrees: list[int] | tuple[int, ...] = param(  # noqa: RUF009
        (5, 4), "Degree of the numerator, and of the denominator.", minimum=1
    )
    version: str = param(
        "A",
        "Denominator: A 1 + Σ|bₖxᵏ|, B 1 + |Σbₖxᵏ|, C 0.1 + |Σbₖxᵏ| with k from 0, D as B with noise in training, "
        "N 1 + Σbₖxᵏ, which has poles.",
        choices=("A", "B", "C", "D", "N"),
    )
    approx_func: str = param("gelu", "The function it is fitted to at the start.", choices=RAF_TARGETS)
    trainable: bool = param(True, "Whether the coefficients learn.")
    input_scaling: bool = param(False, "Map the channels of each token to [−3, 3] first.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.degrees) != 2:
            raise ValueError(f"parameter 'degrees' must be two numbers, got {self.degrees!r}.")


SURVEY = "Three Decades of Activations, arXiv 2402.09092"

# name: (class in modeling, parameters, formula, reference)
_TABLE: dict[str, tuple[str, type[Params], str, str]] = {
    "silu": ("SiLU", Params, "x·σ(x).", "arXiv 1702.03118"),
    "swish": ("Swish", SwishParams, "x·σ(βx); `silu` at β = 1.", "arXiv 1710.05941"),
    "gelu": ("GELU", Params, "x·Φ(x).", "arXiv 1606.08415"),
    "gelu_tanh": ("GELUTanh", Params, "`gelu` with tanh in place of the error function.", "arXiv 1606.08415"),
    "relu": ("ReLU", Params, "max(0, x).", SURVEY),
    "sigmoid": ("Sigmoid", Params, "1/(1 + e^(−x)).", SURVEY),
    "tanh": ("Tanh", Params, "tanh(x).", SURVEY),
    "identity": ("Identity", Params, "x.", SURVEY),
    "mish": ("Mish", Params, "x·tanh(softplus(x)).", "arXiv 1908.08681"),
    "leaky_relu": ("LeakyReLU", LeakyReLUParams, "x for x ≥ 0, slope·x else.", SURVEY),
    "relu6": ("ReLU6", Params, "clamp(x, 0, 6).", SURVEY),
    "hardswish": ("Hardswish", Params, "x·relu6(x + 3)/6.", "arXiv 1905.02244"),
    "arctan": ("Arctan", Params, "arctan(x).", SURVEY),
    "softsign": ("Softsign", Params, "x/(1 + |x|).", SURVEY),
    "elliott": ("Softsign", Params, "x/(1 + |x|), another name of `softsign`.", SURVEY),
    "softplus": ("Softplus", Params, "ln(1 + e^x).", SURVEY),
    "elu": ("ELU", ELUParams, "x for x ≥ 0, α(e^x − 1) else.", "arXiv 1511.07289"),
    "selu": ("SELU", Params, "Scaled `elu` that keeps mean 0 and variance 1 through plain layers.", "arXiv 1706.02515"),
    "celu": ("CELU", ELUParams, "x for x ≥ 0, α(e^(x/α) − 1) else.", "arXiv 1704.07483"),
    "vrelu": ("VReLU", Params, "|x|.", SURVEY),
    "brelu": ("BReLU", BReLUParams, "clamp(x, 0, t).", SURVEY),
    "lisht": ("LiSHT", Params, "x·tanh(x).", "arXiv 1901.05894"),
    "abs_relu": ("AbsReLU", AbsReLUParams, "x for x ≥ 0, −a·x else.", SURVEY),
    "nl_relu": ("NLReLU", NLReLUParams, "ln(1 + βx) for x ≥ 0, 0 else.", "arXiv 1908.03682"),
    "hexpo": ("Hexpo", HexpoParams, "−a(e^(−x/b) − 1) for x ≥ 0, c(e^(x/d) − 1) else.", SURVEY),
    "ptanh": ("PTanh", PTanhParams, "tanh(x) for x ≥ 0, a·tanh(x) else.", "arXiv 1602.05980"),
    "dis_relu": ("DisReLU", DisReLUParams, "max(x, −δ).", SURVEY),
    "elish": ("ELiSH", Params, "x·σ(x) for x ≥ 0, (e^x − 1)·σ(x) else.", "arXiv 1808.00783"),
    "hardelish": ("HardELiSH", HardELiSHParams, "`elish` with a hard sigmoid.", "arXiv 1808.00783"),
    "prelu": ("PReLU", PReLUParams, "x for x ≥ 0, p·x else; p learned per channel.", "arXiv 1502.01852"),
    "pelu": ("PELU", Params, "(α/β)x for x ≥ 0, α(e^(x/β) − 1) else; both learned.", "arXiv 1605.09332"),
    "mpelu": ("MPELU", FormParams, "x for x ≥ 0, α(e^(βx) − 1) else; both learned.", "arXiv 1606.00305"),
    "felu": ("FELU", Params, "x for x ≥ 0, α(e^x − 1) else; α learned within [0, 1].", SURVEY),
    "eelu": ("EELU", EELUParams, "k·x for x ≥ 0, α(e^(βx) − 1) else; α, β learned, k noisy.", SURVEY),
    "pdelu": ("PDELU", PDELUParams, "x for x ≥ 0, a deformed exponential times a learned α else.", SURVEY),
    "preu": ("PREU", FormParams, "αx for x ≥ 0, αx·e^(βx) else; both learned.", SURVEY),
    "softexp": ("SoftExp", Params, "Between logarithm, identity and exponential; α learned.", "arXiv 1602.01321"),
    "swish_trainable": ("TrainableSwish", Params, "x·σ(βx); β learned.", "arXiv 1710.05941"),
    "raf": ("RationalActivation", RAFParams, "A learned ratio of polynomials, P(x)/Q(x).", "arXiv 1907.06732"),
}
LEARNED = frozenset(
    ["prelu", "pelu", "mpelu", "felu", "eelu", "pdelu", "preu", "softexp", "swish_trainable", "raf"]
)  # they have weights, one per channel


def _specs() -> Iterator[ComponentSpec]:
    for name, (class_name, params, formula, reference) in _TABLE.items():
        module = "rational" if name == "raf" else "learned_activations" if name in LEARNED else "activations"
        yield ComponentSpec(
            name=name,
            family="activation",
            summary=formula,
            reference=reference,
            params=params,
            implementation=f"{module}:{class_name}",
        )


ACTIVATION_SPECS = tuple(_specs())

# As `hidden_act` these are another way to write a gated feed-forward block with this activation.
GATED_FORMS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
