"""Float32 products in full precision, whatever else runs in TF32 or bfloat16."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def full_float32() -> AbstractContextManager:
    """Full precision of float32 matrix products, against torch.set_float32_matmul_precision("high"); else free."""
    if torch.compiler.is_compiling() or all(backend.fp32_precision in ("none", "ieee") for backend in BACKENDS):
        return nullcontext()
    return _full_float32()


@contextmanager
def _full_float32() -> Iterator[None]:
    before = [backend.fp32_precision for backend in BACKENDS]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised when only the newer switches, of the backends, were set
        precision = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for backend, one in zip(BACKENDS, before, strict=True):
            backend.fp32_precision = one
