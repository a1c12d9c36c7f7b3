"""Compile, without a GPU, every kernel as the host code would launch it; `test_triton.py` runs this as a program.

Compute capability 8.6 has the least shared memory (99 KiB a program) of the GPUs that Triton and bf16 need.
"""

from itertools import zip_longest
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from frankenstein_hf.modeling.ops.triton import chunk_scan
from frankenstein_hf.modeling.ops.triton.decayed_scan import triton_decayed_scan
from frankenstein_hf.modeling.ops.triton.delta_rule import triton_delta_rule

SHARED = 99 * 1024
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
compiled: dict[str, int] = {}


def compile_instead(self, kernel, grid, *arguments, **meta) -> None:
    """What `Problem._run` would launch."""
    meta |= {"C": self.C, "PRECISION": self.precision}
    signature: dict[str, str] = {}
    for name, value in zip_longest(kernel.arg_names, arguments):
        if name in meta:
            signature[name] = "constexpr"
        elif isinstance(value, int) and value == 1:  # Triton makes such arguments constants
            signature[name], meta[name] = "constexpr", 1
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    key = f"{kernel.fn.__name__} {meta} {signature}"
    if key not in compiled:
        options = chunk_scan._launch_options(SimpleNamespace(is_cuda=True), kernel)
        source = ASTSource(kernel, signature, {name: meta[name] for name in signature if name in meta})
        compiled[key] = triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options).metadata.shared


def main() -> None:
    chunk_scan.Problem._run = compile_instead
    for dtype, T, K in ((torch.float32, 70, 64), (torch.bfloat16, 70, 128), (torch.float32, 1, 64)):
        q, k, e, v = (torch.zeros(1, 1, T, K, dtype=dtype).requires_grad_() for _ in range(4))
        common = dict(scale=1.0, initial_state=None, chunk_size=64)
        for g in (torch.zeros(1, 1, T), torch.zeros(1, 1, T, K)):
            results = [triton_delta_rule(q, k, e, v, g, **common)]
            for axis in ("key", "value"):
                results.append(triton_decayed_scan(q, k, v, g, decay_axis=axis, **common))
            for output, state in results:
                torch.autograd.backward([output, state], [torch.zeros_like(output), torch.zeros_like(state)])
    assert len(compiled) > 30
    too_large = {key: shared for key, shared in compiled.items() if shared > SHARED}
    assert not too_large, too_large
    print(f"{len(compiled)} kernels")


if __name__ == "__main__":
    main()
