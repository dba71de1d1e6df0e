"""Let the PyPI (CUDA) torchvision wheel import beside a CPU-only torch.

Its _C.so links libtorch_cuda.so, so the native ops are absent and the import
dies in _meta_registrations at register_fake("torchvision::nms").  Declaring
the op's schema first is enough; the transforms need no native op.
"""

import importlib.abc
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            lib = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__]._lib = lib
        return


sys.meta_path.insert(0, _Finder())
