"""Spec of `ssog`: a learned field of Gaussians over relative position."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import MixerSpec, Params, param


@dataclass(frozen=True, kw_only=True)
class SSOGParams(Params):
    """Parameters of `ssog`."""

    num_atoms: int = param(4, "Gaussians a head", minimum=1)
    lookat: bool = param(True, "tokens shift, widen and reweight the Gaussians they look through")
    max_offset: float = param(4.0, "how far a token may shift a Gaussian's centre, in tokens", minimum=0.0)
    max_sigma: float = param(4.0, "width up to which a Gaussian is not cut: the field ends 6 of it away", minimum=1e-2)
    cold_init: bool = param(True, "begin with the shifting, widening and reweighting almost off")
    sigma_floor: float = param(0.25, "smallest width of a Gaussian, in tokens", minimum=0.0)
    grid: tuple[int, int] | str = param(
        "auto",
        "[rows, columns] of the tokens' raster; 'auto': the patch grid of an image model, else one row",
        minimum=1,
    )

    @property
    def window(self) -> int:
        """Farthest token to either side, along each axis, that the field reaches."""
        return math.ceil(self.max_offset + 6 * self.max_sigma)

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if isinstance(self.grid, str):
            if self.grid != "auto":
                raise ValueError(f"grid must be 'auto' or [rows, columns], got {self.grid!r}.")
            return replace(self, grid=_patch_grid(config) or "auto")
        if len(self.grid) != 2:
            raise ValueError(f"grid must be 'auto' or [rows, columns], got {self.grid!r}.")
        return self


def _patch_grid(config: Any) -> tuple[int, int] | None:
    """(rows, columns) of patches where the config describes images, else None."""
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    if None in sizes:
        return None
    image, patch = (size if isinstance(size, (list, tuple)) else (size, size) for size in sizes)
    return image[0] // patch[0], image[1] // patch[1]


SPECS = (
    MixerSpec(
        name="ssog",
        family="geometric",
        summary="A learned mixture of Gaussians over relative position; content steers it but never scores content.",
        reference="A Few Gaussians Is All You Need: SSOG-Attention that Steers instead of Scores, pisoni.ai/posts/ssog",
        params=SSOGParams,
        implementation="mixers.geometric.ssog:SeparableGaussianField",
        transfer=("v_proj", "o_proj"),
        causal=False,
        reach=lambda params: params.window if params.grid == "auto" else None,
        small_params={"max_offset": 1.0, "max_sigma": 0.3, "num_atoms": 3},
    ),
)
