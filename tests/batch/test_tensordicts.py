"""To and from tensordict, where it is installed; the advice where it is not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import BatchError, NotFetched
from tests.batch.memory_owner import MemoryOwner
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.tensordicts import from_tensordict, to_tensordict

INSTALLED = importlib.util.find_spec("tensordict") is not None


@pytest.mark.skipif(not INSTALLED, reason="tensordict is not installed in this environment")
def test_a_batch_goes_to_a_tensordict_and_back(owner: MemoryOwner) -> None:
    values: dict[str, Any] = {
        "x": torch.arange(6).view(2, 3),
        "r": torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
        "tags": ["same", "same"],
        "info": [{"a": 1}, None],
    }
    tensors = to_tensordict(DistributedBatch(values))
    assert tensors.batch_size == torch.Size([2]) and tensors["x"].data_ptr() == values["x"].data_ptr()
    again = from_tensordict(tensors)
    assert again["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and again["tags"] == ["same", "same"]
    assert [row.tolist() for row in again["r"].unbind()] == [[0, 1], [0, 1, 2]] and again["info"] == [{"a": 1}, None]
    remote = DistributedBatch.of_entries(owner.put("t", {"x": [1]}), [owner.owner])
    with pytest.raises(NotFetched):
        to_tensordict(remote)


@pytest.mark.skipif(not INSTALLED, reason="tensordict is not installed in this environment")
def test_a_tensordict_in_a_tensordict_and_one_without_rows() -> None:
    import tensordict

    inner = tensordict.TensorDict({"y": torch.arange(2)}, batch_size=[2])
    assert from_tensordict(tensordict.TensorDict({"a": inner}, batch_size=[2]))["a.y"].tolist() == [0, 1]
    with pytest.raises(BatchError, match="no rows"):
        from_tensordict(tensordict.TensorDict({"y": torch.arange(2)}, batch_size=[]))


@pytest.mark.skipif(INSTALLED, reason="tensordict is installed in this environment")
def test_without_tensordict_the_error_says_what_to_install() -> None:
    for convert in (lambda: to_tensordict(DistributedBatch({"x": [1]})), lambda: from_tensordict({})):
        with pytest.raises(BatchError, match="pip install tensordict"):
            convert()
