"""What mixers share: the contract, the split into heads, the layout of rows, and the life of a recurrent state.

Shapes: B batch, T time, R rows, L row length, D model width, H heads, W head width.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..cache import MixerStateLayer, States
from ..context import Rows, SequenceContext
from ..extras import LayerExtras, summed
from ..implementations import implementation
from ..norms import l2_normalize
from ..ops.backend import computing, plain_forms
from ..ops.gated_norm import gated_norm, gated_norm_reference
from ..ops.numerics import at_least_fp32
from ..ops.short_convolution import EPS, Stream, convolved_streams, short_convolution
from ..ops.tracing import exporting, scan_chunks
from ..projections import is_plain, joint_linear
from ..qk_norms import NoQKNorm


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, H·W] -> [B, H, T, W]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, W] -> [B, T, H·W]."""
    return x.transpose(1, 2).flatten(2)


def linear_matrix(linear: nn.Module, like: Tensor) -> Tensor:
    """The matrix M [K, N] of a projection without bias, x ↦ x M, whatever the module keeps it as.

    Args:
        linear: An adapter or a quantised layer may have taken the place of the original: these are called.
        like: […, K], an input as the module gets them.
    """
    if is_plain(linear):
        return linear.weight.mT  # type: ignore[return-value]
    return linear(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device))


class Mixer(nn.Module):
    """Base of all mixers: `forward(hidden_states [B, T, D], context, cache) -> ([B, T, D], LayerExtras | None)`.

    Args:
        config: A `FrankensteinConfig`.
        layer_idx: Which layer this is; parameters come from `config.params_for(layer_idx)`.

    Attributes:
        needs_kernel: Whether a core it calls has Triton kernels, so that attn_implementation="triton" means something
            to it, and needs a GPU.
        plain_cache: Whether its cache is one pair of keys and values, given to `append`, and nothing else.
        takes: Names of tensors that mixers below may have left in `LayerExtras.carried`; they become arguments.
    """

    needs_kernel = False
    plain_cache = False
    takes: tuple[str, ...] = ()

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.params = config.params_for(layer_idx)
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        own = config.attention_output_bias
        self.output_bias = config.attention_bias if own is None else own  # of the last projection

    def joint(self, x: Tensor, *names: str) -> Tensor:
        """What the linear maps called `names` make of x [..., D], side by side: one product where possible."""
        return joint_linear(self, names, x)

    def init_parameters(self) -> None:
        """Fill raw parameters and buffers, through `transformers.initialization` only."""

    def add_qk_norm(self, num_groups: int) -> None:
        """Make what `norm_heads` needs, for `num_groups` key heads; nothing with parameters unless the model asks."""
        spec, params = self.config.component("qk_norm", self.layer_idx)
        takes = self.config.mixer_spec_for(self.layer_idx).qk_norm
        make, options = (implementation(spec), vars(params)) if takes else (NoQKNorm, {})
        self.q_norm = make(self.num_heads, self.head_dim, **options)
        self.k_norm = make(num_groups, self.head_dim, **options)
        learned = options.get("scale") == "learned"
        self.qk_scale = nn.Parameter(torch.empty(self.num_heads)) if learned else None
        scale = self.config.attention_scale if takes else None
        self.query_scale = None if scale is None else scale * self.head_dim**0.5  # beside the 1/√W of every core

    def norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, W] and keys [B, G, T, W], not yet rotated, as `qk_norm` and `attention_scale` have them."""
        q, k = self.q_norm(q), self.k_norm(k)
        q = q if self.query_scale is None else q * self.query_scale
        return q if self.qk_scale is None else q * self.qk_scale[:, None, None].to(q.dtype), k

    def init_options(self) -> None:
        """Fill what options of the model have added: log2(L² − L) as arXiv 2010.04245 begins, L the longest length."""
        scale: Tensor | None = getattr(self, "qk_scale", None)
        if scale is not None:
            longest = max(2, self.config.max_position_embeddings)
            init.constant_(scale, math.log2(longest**2 - longest))

    def begin_as_attention(self) -> list[str]:
        """Set what softmax attention does not have, to begin as near to it as possible; the names of what was set.

        Called without gradient on mixers that have taken over the projections of attention (`MixerSpec.transfer`).
        """
        return []

    def join(self, layer: nn.Module) -> None:
        """Become the mixer of `layer`; a plain reference, which registers no parameter twice."""
        self.__dict__["_layer"] = layer

    def normed(self, x: Tensor) -> Tensor:
        """`x` through the norm of the layer; as it is in a mixer on its own."""
        layer = self.__dict__.get("_layer")
        return x if layer is None else layer.input_layernorm(x)

    def input_norm(self, x: Tensor) -> Tensor:
        """What the layer does to the stream before `forward`; the identity in mixers that take the stream itself."""
        return self.normed(x)

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        """Mix the sequence. See the class."""
        raise NotImplementedError


class RowMixer(Mixer):
    """A mixer with states, windows or borders: it sees rows of one document each and never a pad before the end."""

    def forward(
        self, hidden_states: Tensor, context: SequenceContext, cache: Any = None
    ) -> tuple[Tensor, LayerExtras | None]:
        layer = None if cache is None else cache.layers[self.layer_idx]
        with computing(context.backend, type(self).__name__ if isinstance(self, RecurrentMixer) else None):
            mixed = [self.mix(rows.compact(hidden_states), rows, layer) for rows in context.rows]
        output = context.restore([out for out, _ in mixed])
        extras = [extra for _, extra in mixed if extra is not None]
        if not extras:
            return output, None
        weights = [extra.weights for extra in extras if extra.weights is not None]
        largest = [extra.max_logits for extra in extras if extra.max_logits is not None]
        return output, LayerExtras(
            context.restore_weights(weights) if context.output_attentions and weights else None,
            torch.stack(largest).amax(0) if largest else None,
            summed(extra.aux_losses for extra in extras),
            LayerExtras.merged(extras).metrics,
        )

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        """[R, L, D] -> [R, L, D], and what is to be said of these rows besides; weights are [R, H, L, L]."""
        raise NotImplementedError


class Run(NamedTuple):
    """How a recurrence is to be run.

    Attributes:
        lengths: [R] real tokens of each row, or None when all are real. What lies behind them must not reach the
            returned states.
        exclude_own: Read every token's state without its own write.
        sequential: Token by token, as the paper writes it.
    """

    lengths: Tensor | None = None
    exclude_own: bool = False
    sequential: bool = False


class RecurrentMixer(RowMixer):
    """A mixer that is `project`, a recurrence `scan` over the projections, and `finish`.

    Backwards in time an encoder runs the same `scan` over the mirrored projections and adds the two readouts; the
    reverse one leaves out each token's own write, which the forward one has read already.
    """

    needs_kernel = True  # a recurrence on none of the cores that have kernels says False
    traces_chunks = True  # one whose chunk form cannot be traced says False, and is traced token by token

    def project(self, x: Tensor, rows: Rows) -> States:
        """[R, L, D] -> tensors [R, L, …]: everything a state can learn from the tokens."""
        raise NotImplementedError

    def scan(self, inputs: States, states: States, run: Run) -> tuple[Tensor, States]:
        """Run the recurrence.

        Args:
            inputs: What `project` returned.
            states: States before the first token; empty at the start.
            run: How.

        Returns:
            Readout [R, L, …] and the states after the last real token.
        """
        raise NotImplementedError

    def finish(self, readout: Tensor, x: Tensor) -> Tensor:
        """Readout and input [R, L, D] -> output [R, L, D]."""
        raise NotImplementedError

    def advance(self, inputs: States, states: States, lengths: Tensor | None) -> States:
        """The states after `inputs`; replays a call when a cache rolls back."""
        return self.scan(inputs, states, Run(lengths))[1]

    def mix(self, x: Tensor, rows: Rows, layer: MixerStateLayer | None) -> tuple[Tensor, LayerExtras | None]:
        sequential = rows.context.backend == "eager"
        inputs = self.project(x, rows)
        states = (layer.read(self.advance) if layer is not None else None) or {}
        readout, states = self.run(inputs, states, Run(rows.lengths, sequential=sequential))
        if layer is not None:
            layer.write(states, inputs, rows.context.keep)
        if not rows.is_causal:
            mirrored = {name: rows.flip(tensor) for name, tensor in inputs.items()}
            reverse, _ = self.run(mirrored, {}, Run(rows.lengths, exclude_own=True, sequential=sequential))
            readout = readout + rows.flip(reverse)
        return self.finish(readout, x), None

    def run(self, inputs: States, states: States, how: Run) -> tuple[Tensor, States]:
        """`scan`; in a traced graph, which holds no loop over an unknown length, by chunks of a known one."""
        L = next(iter(inputs.values())).shape[1]
        if not exporting() or (isinstance(L, int) and L == 1):
            return self.scan(inputs, states, how)
        how = how._replace(sequential=how.sequential or not self.traces_chunks)

        def step(inputs: States, states: States, lengths: Tensor) -> tuple[Tensor, States]:
            return self.scan(inputs, states, how._replace(lengths=lengths))

        return scan_chunks(step, inputs, states, how.lengths)


def zero_beyond(x: Tensor, lengths: Tensor | None) -> Tensor:
    """`x` [R, L, …] with zeros behind the real tokens."""
    if lengths is None:
        return x
    beyond = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(beyond.view(*beyond.shape, *[1] * (x.dim() - 2)), 0.0)


def padded(x: Tensor, size: int, front: bool = True) -> Tensor:
    """`x` [R, P, G, W] with zeros before or behind it, at least `size` long."""
    missing = size - x.shape[1]
    return nn.functional.pad(x, (0, 0, 0, 0, missing, 0) if front else (0, 0, 0, 0, 0, missing)) if missing > 0 else x


def last_real(past: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
    """The last P real entries of `past` [R, P, …] followed by `new` [R, L, …], of which `lengths` [R] are real."""
    P, L = past.shape[1], new.shape[1]
    if lengths is None:
        return new[:, L - P :] if P <= L else torch.cat([past[:, L:], new], dim=1)
    index = lengths[:, None] + torch.arange(P, device=new.device)
    index = index.view(*index.shape, *[1] * (new.dim() - 2)).expand(-1, -1, *new.shape[2:])
    return torch.cat([past, new], dim=1).gather(1, index)


def activate_streams(x: Tensor, streams: tuple[Stream, ...], activation: str) -> tuple[Tensor, ...]:
    """Activate x [R, L, E], part it into `streams`, and bring unit heads to length one."""
    x = nn.functional.silu(x) if activation == "silu" else x
    parts = x.split([stream.channels for stream in streams], dim=-1)
    return tuple(
        part if unit is None else l2_normalize(part.unflatten(-1, (-1, unit)), EPS).flatten(2)
        for part, (_, unit) in zip(parts, streams)
    )


class ShortConvolution(nn.Module):
    """Causal depthwise convolution and an activation, carrying its last W−1 inputs from call to call.

    Args:
        channels: Channels E.
        kernel_size: Taps W; the last one weighs the current token.
        bias: Whether to add a learned bias.
        activation: "silu" or "identity".
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = False, activation: str = "silu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.activation = activation

    def init_parameters(self) -> None:
        """Uniform in ±1/√W, as PyTorch initialises a depthwise convolution."""
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, tail: Tensor | None, lengths: Tensor | None, streams: tuple[Stream, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Convolve, activate and part a row.

        Args:
            x: [R, L, E].
            tail: [R, W−1, E] the inputs before it, None at the start.
            lengths: [R] real tokens, all if None.
            streams: How the channels are parted, and which of them become heads of length one; one part if None.

        Returns:
            The parts [R, L, channels], and the next tail.
        """
        streams = streams or (Stream(x.shape[2]),)
        past = self.weight.shape[1] - 1
        if tail is not None:
            tail = tail.to(x.dtype)
        if x.shape[1] == 1:
            window = torch.cat([x.new_zeros(x.shape[0], past, x.shape[2]) if tail is None else tail, x], dim=1)
            y = (at_least_fp32(window) * self.weight.mT).sum(1, keepdim=True)
            y = (y if self.bias is None else y + self.bias).to(x.dtype)
            parts = activate_streams(y, streams, self.activation)
            return parts, window[:, 1:] if lengths is None else last_real(window[:, :-1], x, lengths)
        if self.activation != "silu" or plain_forms():
            y = short_convolution(x, self.weight, self.bias, tail)
            parts = activate_streams(y, streams, self.activation)
        else:
            parts = convolved_streams(x, self.weight, self.bias, tail, streams)
        if tail is None and (lengths is not None or x.shape[1] < past):
            tail = x.new_zeros(x.shape[0], past, x.shape[2])
        elif tail is None:
            tail = x[:, :past]  # all of it is forgotten
        return parts, last_real(tail, x, lengths).clone()  # a view would keep all of x


def qkv_convolution(params: Any, streams: tuple[Stream, ...]) -> ShortConvolution | None:
    """The convolution on q, k and v that `params` ask for, if they do."""
    if not params.use_short_conv:
        return None
    channels = sum(stream.channels for stream in streams)
    return ShortConvolution(channels, params.conv_kernel, activation=params.activation)


def pass_through(conv: ShortConvolution | None) -> list[str]:
    """Make the convolution of a mixer, if it has one, hand on every token as it is; the name of what was set."""
    if conv is None:
        return []
    conv.weight.zero_()
    conv.weight[:, -1] = 1.0
    if conv.bias is not None:
        conv.bias.zero_()
    return ["conv.weight"] if conv.bias is None else ["conv.weight", "conv.bias"]


def convolve_streams(
    conv: ShortConvolution | None,
    qkv: Tensor,
    states: States,
    run: Run,
    streams: tuple[Stream, ...],
    activation: str,
) -> tuple[tuple[Tensor, ...], States]:
    """q, k and v [R, L, channels] of projections [R, L, E], convolved if at all, and the tail to keep."""
    if conv is None:
        return activate_streams(qkv, streams, activation), {}
    parts, tail = conv(qkv, states.get("tail"), run.lengths, streams)
    return parts, {"tail": tail}


SLOW = 1e-3  # −log α of a decay that has hardly begun, as of mixers that take over from attention


def init_step_bias(bias: Tensor, low: float = 1e-3, high: float = 0.1) -> None:
    """Fill `bias` such that softplus(bias) is log-uniform in (low, high)."""
    step = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp()
    init.copy_(bias, step + torch.log(-torch.expm1(-step)))


class GatedHeadNorm(nn.Module):
    """Normalise each head's readout, scale it, and gate it.

    Args:
        num_heads, head_dim: H and W.
        eps: Of the norm.
        centred: Subtract each head's mean too and learn H·W gains and biases (group norm over heads); otherwise divide
            by the root mean square and learn W gains shared by the heads.
        activation: Of the gate, "silu" or "sigmoid".
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, centred: bool, activation: str = "silu") -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim) if centred else torch.ones(head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if centred else None

    def init_parameters(self) -> None:
        """The identity after normalising."""
        init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, readout: Tensor, gate: Tensor | None) -> Tensor:
        """Readout [R, L, H, W], gate [R, L, H·W] or None -> [R, L, H·W] in the dtype of `readout`."""
        compute = gated_norm_reference if plain_forms() or readout.shape[1] == 1 else gated_norm
        return compute(readout, gate, self.weight, self.bias, self.eps, self.activation)
