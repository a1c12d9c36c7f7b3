"""Parameters as stacks of matrices, for methods that treat a weight as a linear map."""

from collections.abc import Sequence

from torch import Tensor


def matrix_shape(shape: Sequence[int], layout: str = "stack") -> tuple[int, int, int]:
    """(S, m, n): S matrices [m, n] in a parameter of this shape; see `as_matrices`."""
    if layout not in ("stack", "flatten"):
        raise ValueError(f"layout must be 'stack' or 'flatten', got {layout!r}.")
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {tuple(shape)} is no matrix.")
    leading = shape[:1] if layout == "flatten" else shape[:-1]
    rows, columns = leading[-1], 1
    for size in shape[len(leading) :]:
        columns *= size
    stack = 1
    for size in leading[:-1]:
        stack *= size
    return stack, rows, columns


def as_matrices(tensor: Tensor, layout: str = "stack") -> Tensor:
    """A parameter, gradient or state as [S, m, n]; a view where the memory layout allows.

    Args:
        tensor: [m, n], stacked experts […, m, n], or a convolution [out, in, taps …].
        layout: "stack": leading axes count matrices. "flatten": everything but the first axis is one axis, as a
            convolution maps patches to channels. The group's "layout" says which.
    """
    return tensor.reshape(matrix_shape(tensor.shape, layout))


def by_shape(tensors: Sequence[Tensor], layout: str = "stack") -> dict[tuple[int, int], list[int]]:
    """Positions of the tensors whose matrices have the same shape [m, n], so that they can be processed as one stack:
    `torch.cat([as_matrices(tensors[i], layout) for i in positions])`.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(matrix_shape(tensor.shape, layout)[1:], []).append(i)
    return alike
