"""`xsa`: softmax attention whose output is projected off the token's own value.

Shapes: B batch, H heads, G key/value heads, T time, W head width, D model width.
"""

from torch import Tensor
from torch.nn import functional as F

from ...ops.numerics import at_least_fp32
from ...ops.scored_attention import eager_attention
from .standard import StandardAttention


def eager_xsa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """y_i = Σ_j softmax_j(q_i k_j / √W) v_j and z_i = y_i − (y_i · v̂_i) v̂_i with v̂ = v / ‖v‖; T queries, T keys."""
    y, _ = eager_attention(q, k, v, mask)
    return exclude(y, v)


def exclude(y: Tensor, v: Tensor) -> Tensor:
    """y [B, H, T, W] without its component along v [B, G, T, W]; each of the G heads serves H/G consecutive ones."""
    unit = F.normalize(at_least_fp32(v), dim=-1)[:, :, None]
    grouped = at_least_fp32(y).unflatten(1, (v.shape[1], -1))
    return (grouped - (grouped * unit).sum(-1, keepdim=True) * unit).flatten(1, 2).to(y.dtype)


class ExclusiveSelfAttention(StandardAttention):
    """`standard` with each head's output made orthogonal to the token's own value: attention is left the context.

    What a token says of itself reaches the next layer through the residual stream. Only the newest value is needed for
    it, so decoding keeps keys and values as `standard` does. The first token of a causal sequence reads nothing.
    """

    def readout(self, output: Tensor, value: Tensor, hidden_states: Tensor) -> Tensor:
        return exclude(output, value)
