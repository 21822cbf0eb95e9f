"""`import weightwire`: the face over both packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

import inference_plugin
import trainer_adapters
import weightwire
from inference_plugin.wire import errors


def test_every_name_of_the_face_is_the_same_object_as_in_its_home() -> None:
    for name in trainer_adapters.__all__:
        assert getattr(weightwire, name) is getattr(trainer_adapters, name)
    for name in set(weightwire.__all__) & set(errors.__all__):
        assert getattr(weightwire, name) is getattr(errors, name)
    assert all(hasattr(weightwire, name) for name in weightwire.__all__)
    assert weightwire.__version__ == inference_plugin.__version__


def test_the_face_has_every_error_that_users_catch() -> None:
    tree = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    raised = {name for name in tree if issubclass(getattr(errors, name), errors.WeightwireError)}
    assert raised <= set(weightwire.__all__)


def test_a_name_that_it_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = weightwire.Nonsense


def test_importing_it_imports_neither_torch_nor_an_engine() -> None:
    code = "import sys, weightwire; print(sorted({'torch', 'vllm', 'sglang', 'ray', 'megatron'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_python_m_weightwire_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "weightwire", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in ran.stdout and "status" in ran.stdout
