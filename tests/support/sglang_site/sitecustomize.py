"""Python runs this at its start where this directory is on PYTHONPATH: the packages of SGLang's environment are there as well,
behind those of the interpreter's own. And verl 0.9.1's server for SGLang starts: it takes SGLang's `ServerArgs` for a dataclass
(`dataclasses.fields`), which it is not in 0.5.20 and later."""

import dataclasses
import os
import site
from types import SimpleNamespace

site.addsitedir(os.environ["WEIGHTWIRE_TEST_SGLANG_SITE"])

_fields = dataclasses.fields


def fields(kind):
    names = getattr(kind, "__struct_fields__", None)
    return _fields(kind) if names is None else tuple(SimpleNamespace(name=name) for name in names)


dataclasses.fields = fields
