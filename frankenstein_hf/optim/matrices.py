"""Parameters as stacks of matrices, for methods that treat a weight as a linear map."""

from collections.abc import Sequence

from torch import Tensor

LAYOUTS = ("stack", "flatten", "transpose")


def matrix_shape(shape: Sequence[int], layout: str = "stack") -> tuple[int, int, int]:
    """(S, m, n): S matrices [m, n] in a parameter of this shape; see `as_matrices`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {tuple(shape)} is no matrix.")
    leading = shape[:1] if layout == "flatten" else shape[:-1]
    rows, columns = leading[-1], 1
    for size in shape[len(leading) :]:
        columns *= size
    stack = 1
    for size in leading[:-1]:
        stack *= size
    return (stack, columns, rows) if layout == "transpose" else (stack, rows, columns)


def as_matrices(tensor: Tensor, layout: str = "stack") -> Tensor:
    """A parameter, gradient or state as [S, m, n], m outputs and n inputs; a view where the memory layout allows.

    Args:
        tensor: [m, n], stacked experts […, m, n], a convolution [out, in, taps …], or a weight […, n, m].
        layout: "stack": leading axes count matrices. "flatten": everything but the first axis is one axis, as a
            convolution maps patches to channels. "transpose": the weight is multiplied from the right, as GPT-2's.
            The group's "layout" says which.
    """
    stack, m, n = matrix_shape(tensor.shape, layout)
    return tensor.reshape(stack, n, m).mT if layout == "transpose" else tensor.reshape(stack, m, n)


def from_matrices(matrices: Tensor, shape: Sequence[int], layout: str = "stack") -> Tensor:
    """The inverse of `as_matrices`: [S, m, n] in the shape of the parameter."""
    return (matrices.mT if layout == "transpose" else matrices).reshape(shape)


def by_shape(tensors: Sequence[Tensor], layout: str = "stack") -> dict[tuple[int, int], list[int]]:
    """Positions of the tensors whose matrices have the same shape [m, n], so that they can be processed as one stack:
    `torch.cat([as_matrices(tensors[i], layout) for i in positions])`.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(matrix_shape(tensor.shape, layout)[1:], []).append(i)
    return alike
