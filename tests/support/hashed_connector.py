"""A KV connector of a CPU that finds prompts by the hashes of vLLM's blocks, as OffloadingConnector does.
Its files are never removed, whatever it is told: so looks a store that other replicas fill as well."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

__all__ = ["HashedConnector"]


class HashedConnector(ExampleConnector):
    def reset_cache(self) -> bool:
        assert not self.__dict__.get("forgot"), "as OffloadingConnector: not twice without a step between"
        self.forgot = True
        return True

    def _found_match_for_request(self, request: Any) -> bool:
        keys = self.__dict__.setdefault("keys", {})
        key = keys[request.request_id] = [request.block_hashes[0].hex()]
        return self._found_match_for_prompt(list(request.prompt_token_ids), key)

    def build_connector_meta(self, scheduler_output: Any) -> ExampleConnectorMetadata:
        """Each new request is loaded where it was found, and stored where it was not."""
        self.forgot = False
        meta = ExampleConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            load = self._requests_need_load.pop(new.req_id, None) is not None
            key = self.__dict__["keys"].pop(new.req_id)
            if load or not self._found_match_for_prompt(new.prompt_token_ids, key):
                meta.add_request(new.prompt_token_ids, new.block_ids[0], self._block_size, not load, key)
        return meta
