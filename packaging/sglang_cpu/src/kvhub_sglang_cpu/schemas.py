"""Declare the torchvision operators that a CUDA build of torchvision cannot load."""

from __future__ import annotations

from typing import Any

_libraries: list[Any] = []  # a torch.library.Library takes its operators with it when collected


def autoload() -> None:
    """Called at the end of `import torch` (entry point group `torch.backends`).

    torchvision's Python layer registers fake kernels for `nms` and `qnms`, which
    needs their schemas; beside a CPU-only torch its extension does not load, so
    nobody has declared them. With the bare schemas the import works, image
    transforms work, and the two detection operators raise if they are called.
    Does nothing with a CUDA or ROCm torch.
    """
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
