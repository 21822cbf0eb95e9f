"""Lets torchvision be imported beside CPU torch: its wheel's operators are compiled for CUDA and don't load.

torchvision registers fake kernels for two operators as it is imported, and dies when they aren't there. Their schemas
are declared here just before; nothing implements them, so a call raises. Python runs this at its start (see the .pth).
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _BeforeMetaRegistrations(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            import torch

            for name, schema in SCHEMAS.items():
                if not hasattr(torch.ops.torchvision, name.partition("::")[2]):
                    torch.library.define(name, schema)
        return


sys.meta_path.insert(0, _BeforeMetaRegistrations())
