"""vLLM's models with a vision tower import the image processor of Pixtral, which needs torchvision.

The pinned torch has no CPU build of that. Importing this module puts an empty one in the processor's place: models
other than Pixtral never call it.
"""

from __future__ import annotations

import importlib.util
import sys
import types

PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"


class _Missing(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


if importlib.util.find_spec("torchvision") is None:
    sys.modules.setdefault(PIXTRAL, _Missing(PIXTRAL))
