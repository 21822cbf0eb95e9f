"""What SGLang on CPU lacks here. Python runs this at its start (see the .pth).

- torchvision's operators are compiled for CUDA and don't load beside CPU torch. It registers fake kernels for two of them
  as it is imported, and dies when they aren't there. Their schemas are declared here just before; nothing implements
  them, so a call raises.
- SGLang's attention for CPU has no `get_cpu_graph_seq_len_fill_value`, which data-parallel attention asks for: the
  length that padding rows are given. It is 1, as in SGLang's other backends.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

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


class _AfterTorchNativeAttention(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "sglang.srt.layers.attention.torch_native_backend":
            return None
        spec = PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorchNativeAttention())
sys.meta_path.insert(0, _BeforeMetaRegistrations())
