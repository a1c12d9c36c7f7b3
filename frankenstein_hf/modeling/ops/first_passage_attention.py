"""Softmax attention with a bias that is the deepest dip of a field below a key's level, tile by tile.

    b_ts = β min(0, min_{s<u≤t} φ_u − ψ_s),  b_tt = 0

Shapes: B batch, H query heads, G key/value heads, T tokens, queries and keys alike, K, V head widths; tiles as in
        `biased_attention`: i queries t, j keys s.

For keys in front of a tile of queries the inner minimum is the smaller of one number a key (of what lies between it and
the tile) and one number a query (of the tile up to it). Gradients go to φ as if the inner minimum were the soft one,
−τ ln Σ exp(−φ_u/τ); its two halves x_s, y_t share a pair's gradient as σ(x_s − y_t) and σ(y_t − x_s), so sums over rows
and columns of a tile are all that is kept, and nothing grows with the range of the field.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .biased_attention import LOG2_E, Bias, biased_attention

TILE = (128, 128)
DEAD = -1e30  # bias of a key that is left out
FLOOR = 1e4  # nats below everything else: exactly nothing in a soft minimum


def first_passage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    field: Tensor,
    level: Tensor,
    strength: Tensor,
    temperature: float = 1.0,
    threshold: float | None = None,
    *,
    exclude_own: bool = False,
    tile: tuple[int, int] = TILE,
) -> tuple[Tensor, Tensor]:
    """softmax(K^−½ q_t k_sᵀ + b_ts, over s ≤ t) v.

    Args:
        query, key, value: [B, H, T, K], [B, G, T, K], [B, G, T, V].
        field, level: [B, H, T] φ and ψ, in fp64: they are sums over all tokens, of which differences matter.
        strength: [H] β > 0.
        temperature: τ of the surrogate gradient.
        threshold: Keys whose bias is below its negative are left out; None: none.
        exclude_own: Leave out s = t.
        tile: Queries and keys of a tile.

    Returns:
        Output [B, H, T, V] and log-sum-exps [B, H, T].
    """
    bias = _FirstPassage(field, level, strength, key.shape[1], temperature, threshold)
    last = torch.arange(query.shape[2], device=query.device)[None] - int(exclude_own)
    return biased_attention(query, key, value, last, bias, tile=tile)


class _FirstPassage(Bias):
    def __init__(
        self, field: Tensor, level: Tensor, strength: Tensor, num_groups: int, temperature: float, limit: float | None
    ) -> None:
        B, H, T = field.shape
        self.given = field, level, strength
        self.soft = -field.detach().view(B * num_groups, -1, T) / temperature
        κ = (strength.detach().double() * LOG2_E).expand(B, H).reshape(B * num_groups, -1, 1)
        self.κ = κ
        self.φ, self.ψ = (x.detach().view(B * num_groups, -1, T) * κ for x in (field, level))
        self.limit = None if limit is None else limit * LOG2_E
        self.share: tuple[Tensor, ...] | None = None  # of the present tile of queries, see `_begin_gradient`

    def inputs(self) -> tuple[Tensor, ...]:
        return self.given

    def begin(self, n: slice, i: slice) -> None:
        start, φ = i.start, self.φ[n]
        reference = φ[..., start, None]
        self.prefix = φ[..., i].cummin(-1).values - reference
        self.between = φ.new_full((*φ.shape[:2], start), torch.inf)  # minimum over what lies between key and tile
        if start > 1:
            self.between[..., :-1] = φ[..., 1:start].flip(-1).cummin(-1).values.flip(-1)
        self.dip = (self.between - self.ψ[n, :, :start]).clamp_max(0.0)
        self.drop = reference - self.ψ[n, :, :start]

    def add(self, scores: Tensor, n: slice, i: slice, j: slice, whole: bool) -> None:
        if j.stop <= i.start:
            prefix, drop, dip = (x.to(scores.dtype) for x in (self.prefix, self.drop[..., j], self.dip[..., j]))
            bias = prefix[..., None] + drop[:, :, None]
            torch.minimum(bias, dip[:, :, None], out=bias)
        else:
            low = min(i.start, j.start)
            u, s = (torch.arange(a, b, device=scores.device) for a, b in ((low, i.stop), (j.start, j.stop)))
            later = torch.where(u[:, None] > s, self.φ[n, :, low : i.stop, None], torch.inf)
            minimum = later.cummin(-2).values[..., i.start - low :, :]
            bias = (minimum - self.ψ[n, :, None, j]).clamp_max(0.0).to(scores.dtype)
        if self.limit is not None:
            bias.masked_fill_(bias < -self.limit, DEAD)
        self.tile = bias
        scores.add_(bias)

    def range(self, n: slice, i: slice, j: slice) -> tuple[Tensor | float, Tensor | float]:
        if j.stop > i.start or self.limit is not None:
            return -torch.inf, 0.0
        prefix, drop, dip = self.prefix.amin(-1), self.drop[..., j].amin(-1), self.dip[..., j].amin(-1)
        return torch.minimum(prefix + drop, dip)[..., None].to(torch.float32), 0.0

    # ------------------------------------------------------------------ gradients

    def reset(self) -> None:
        self.dφ, self.dψ = torch.zeros_like(self.φ), torch.zeros_like(self.ψ)
        self.dβ = torch.zeros_like(self.κ[..., 0])
        self.share = None

    def collect(self, grad: Tensor, n: slice, i: slice, j: slice) -> None:
        if self.share is None:
            self._begin_gradient(n, i)
        open_ = grad.mul(self.tile.sign().neg_())  # zero where the outer minimum is closed
        self.dψ[n, :, j] -= open_.sum(-2)
        self.dβ[n] += (open_ * self.tile).sum((-1, -2))
        if j.stop <= i.start:
            x, y, dx, dy = self.share  # type: ignore[misc]  # made above
            part = (x[..., j].to(grad.dtype)[:, :, None] - y.to(grad.dtype)[..., None]).sigmoid_().mul_(open_)
            dx[..., j] += part.sum(-2)
            dy += open_.sub_(part).sum(-1)
            return
        low = min(i.start, j.start)
        u, s = (torch.arange(a, b, device=grad.device) for a, b in ((low, i.stop), (j.start, j.stop)))
        with torch.enable_grad():
            f = self.soft[n, :, low : i.stop].detach().requires_grad_()
            later = torch.where(u[:, None] > s, f[..., None], f.detach().min() - FLOOR)
            z = later.logcumsumexp(-2)[..., i.start - low :, :]
        (df,) = torch.autograd.grad(z, f, open_.to(z.dtype))
        self.dφ[n, :, low : i.stop] += df

    def _begin_gradient(self, n: slice, i: slice) -> None:
        """ln Σ exp(−φ_u/τ) of what lies between each key and the tile, and of the tile up to each query."""
        f, start = self.soft[n], i.start
        reference = f[..., start, None]
        x = f.new_full((*f.shape[:2], start), -torch.inf)
        if start > 1:
            x[..., :-1] = f[..., 1:start].flip(-1).logcumsumexp(-1).flip(-1) - reference
        y = f[..., i].logcumsumexp(-1) - reference
        self.share = x, y, torch.zeros_like(x), torch.zeros_like(y)

    def end(self, n: slice, i: slice) -> None:
        if self.share is None:
            return
        _, _, dx, dy = self.share
        start = i.start
        with torch.enable_grad():
            f = self.soft[n, :, : i.stop].detach().requires_grad_()
            outputs, grads = [f[..., start:].logcumsumexp(-1)], [dy]
            if start > 1:
                outputs.append(f[..., 1:start].flip(-1).logcumsumexp(-1).flip(-1))
                grads.append(dx[..., :-1])
        (df,) = torch.autograd.grad(outputs, f, grads)
        self.dφ[n, :, : i.stop] += df
        self.share = None

    def gradients(self) -> tuple[Tensor, ...]:
        field, _, strength = self.given
        dφ, dψ = ((x * self.κ).view_as(field) for x in (self.dφ, self.dψ))
        dβ = self.dβ.view(field.shape[0], -1).sum(0) / strength.detach()
        return dφ, dψ, dβ.to(strength.dtype)


def soft_minimum(field: Tensor, own: Tensor, temperature: float) -> Tensor:
    """−τ ln Σ_{s<u≤t} exp(−φ_u/τ) for every query t and key s, key by key; twice differentiable.

    Args:
        field: [B, H, S] φ.
        own: [B or 1, T] places of the queries.
        temperature: τ.

    Returns:
        [B, H, T, S]; without any u it is large.
    """
    f, t = -field / temperature, own[:, None].expand(*field.shape[:2], -1)
    z = f.new_full(t.shape, float(f.detach().min()) - FLOOR)
    columns = [z]
    for s in reversed(range(field.shape[2] - 1)):
        new = f[..., s + 1, None]
        z = torch.where(t > s, new + F.softplus(z - new, threshold=40), z)  # ln(exp z + exp new), twice differentiable
        columns.append(z)
    return -temperature * torch.stack(columns[::-1], dim=-1)


def first_passage_bias(
    field: Tensor, level: Tensor, strength: Tensor, own: Tensor, temperature: float, threshold: float | None
) -> Tensor:
    """b_ts [B, H, T, S], the readable form; `own` [B or 1, T] are the places of the queries among the S keys."""
    u = torch.arange(field.shape[2], device=field.device)
    past = torch.where(u <= own[:, None, :, None], field[:, :, None], torch.inf)
    suffix = past.flip(-1).cummin(-1).values.flip(-1)
    minimum = F.pad(suffix[..., 1:], (0, 1), value=torch.inf)
    if torch.is_grad_enabled() and field.requires_grad:
        soft = soft_minimum(field, own, temperature)
        some = minimum.isfinite()
        minimum = torch.where(some, soft + (minimum - soft).detach().masked_fill(~some, 0.0), torch.inf)
    below = minimum - level[:, :, None]
    bias = strength.double()[:, None, None] * torch.where(below < 0, below, 0.0)
    return bias if threshold is None else bias.masked_fill(bias < -threshold, DEAD)
