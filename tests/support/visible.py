"""What users, load balancers and monitoring see of a real server's replica: metrics, /ready, answers and the log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from packaging.version import Version
from prometheus_client.parser import text_string_to_metric_families as parse

from inference_plugin.cli import app
from inference_plugin.engines.monkeypatch import installed_version
from inference_plugin.engines.vllm.patch_points import VLLM
from tests.support.engines import HttpEngine, Server, eventually
from tests.support.sglang_engines import SglangServer
from trainer_adapters import SyncManager, WeightSource

__all__ = ["CHAT", "Samples", "check_probe", "check_visible_on_sglang", "check_visible_on_vllm", "samples", "value"]

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A chat template, for a server of a model that has none."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str, parser: Any = parse) -> Samples:
    """Values by name and sorted labels."""
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in parser(text) for s in family.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def check_visible_on_vllm(
    server: Server, replica: str, prompt: Sequence[int], source: WeightSource, sync: SyncManager
) -> None:
    """Version 2 is served, after one commit that was undone and one that tore the replica. Metrics are scraped during two
    more."""
    labels = {"replica": replica, "group": "policy"}
    eventually(lambda: server.request("GET", "/ready?min_version=2")[0] == 200, what="/ready")
    status, answer = server.request("GET", "/ready?min_version=3")
    assert status == 503 and answer["why"] == [f"{replica} serves version 2 of policy, not 3"]
    found = samples(server.text("/metrics"))
    assert value(found, "weightwire_engine_version", **labels) == 2
    assert value(found, "weightwire_engine_commits_total", **labels) == 1
    assert value(found, "weightwire_engine_commit_failures_total", kind="CommitFailed", **labels) == 1
    assert value(found, "weightwire_engine_commit_failures_total", kind="TornReplica", **labels) == 1
    assert value(found, "weightwire_engine_installed_bytes_total", **labels) > 0
    assert any(name.startswith("vllm:") for name, _ in found), "the engine's own are there as before"
    says_versions = Version(installed_version(*VLLM.distributions)) >= Version("0.32")
    told_of_it = "answers over HTTP don't say which version made them" in server.log.read_text(errors="replace")
    assert told_of_it is not says_versions
    spans = [{"version": "2", "start": 0, "end": 4}]
    metadata = {"weight_version": "2", "weight_versions": spans} if says_versions else None
    for path, body in (
        ("/v1/completions", {"prompt": list(prompt)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c d e f"}]}),
    ):
        status, answer = server.request(
            "POST", path, {"model": str(server.model), "max_tokens": 4, "ignore_eos": True, **body}
        )
        assert status == 200 and answer.get("metadata") == metadata, answer
        two = {"model": str(server.model), "max_tokens": 4, "ignore_eos": True, "n": 2, **body}
        choices = server.request("POST", path, two)[1]["choices"]
        assert [choice.get("metadata") for choice in choices] == [metadata] * 2
        streamed = server.stream(path, max_tokens=4, ignore_eos=True, n=2, **body)
        *chunks, last = streamed.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]" and "error" not in streamed, streamed
        told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        ends = [chunk for chunk in told if chunk["choices"][0]["finish_reason"]]
        assert sorted(chunk["choices"][0]["index"] for chunk in ends) == [0, 1]
        assert [chunk["metadata"] for chunk in told if "metadata" in chunk] == [metadata] * 2 * says_versions
        assert all(("metadata" in chunk) is says_versions for chunk in ends)
    check_scraped_during_updates(server, replica, source, sync, 2)
    log = server.log.read_text(errors="replace")
    assert log.count(f"replica {replica} is ready for weight updates") == 1
    for version in (2, 3, 4):
        assert log.count(f"replica {replica} serves version {version} of policy") == 1


def check_scraped_during_updates(
    server: HttpEngine, replica: str, source: WeightSource, sync: SyncManager, served: int
) -> None:
    """Metrics during two updates say one version after the other, and count both commits at the end."""
    labels = {"replica": replica, "group": "policy"}
    before = value(samples(server.text("/metrics")), "weightwire_engine_commits_total", **labels)
    scraped = []
    for version in (served + 1, served + 2):
        pending = sync.update_async(source, version)
        while not pending.done():
            scraped.append(value(samples(server.text("/metrics")), "weightwire_engine_version", **labels))
        pending.result(600)
    eventually(lambda: server.request("GET", f"/ready?min_version={served + 2}")[0] == 200, what="the last version")
    assert scraped == sorted(scraped) and set(scraped) <= {served, served + 1, served + 2}
    assert value(samples(server.text("/metrics")), "weightwire_engine_commits_total", **labels) == before + 2


def check_visible_on_sglang(
    server: SglangServer, prompt: Sequence[int], source: WeightSource, sync: SyncManager, model: Path
) -> None:
    """Version 100 is served. Metrics are scraped during two more updates. Then the user loads the same weights from `model`."""
    eventually(lambda: server.request("GET", "/ready?min_version=100")[0] == 200, what="/ready")
    assert server.request("GET", "/ready?min_version=101")[0] == 503
    (card,) = server.cards
    found = samples(server.text("/metrics"))
    assert value(found, "weightwire_engine_version", replica=card.replica, group="policy") == 100
    assert server.request("GET", "/get_model_info")[1]["weight_version"] == "100"
    body = {"model": "m", "prompt": list(prompt), "max_tokens": 4, "ignore_eos": True}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200 and answer["metadata"]["weight_version"] == "100", answer
    check_scraped_during_updates(server, card.replica, source, sync, 100)
    log = server.log.read_text(errors="replace")
    assert log.count(f"replica {card.replica} is ready for weight updates") == 1
    for version in (100, 101, 102):
        assert log.count(f"replica {card.replica} serves version {version} of policy") == 1
    assert server.request("GET", "/get_model_info")[1]["weight_version"] == "102"
    assert server.request("POST", "/update_weights_from_disk", {"model_path": str(model)})[1]["success"]
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200 and answer["metadata"]["weight_version"] == "unknown", answer
    eventually(lambda: server.request("GET", "/ready?min_version=1")[0] == 503, what="/ready")
    assert server.request("GET", "/get_model_info")[1]["weight_version"] == "unknown"
    status, answer = server.request("GET", "/ready?min_version=1")
    assert answer["why"] == [f"{card.replica} serves an unknown version of policy, not 1"]


def check_probe(server: HttpEngine, served: Path, other: Path) -> None:
    """`weightwire verify --probe` tells the served checkpoint from the other one."""
    for model, ok in ((served, True), (other, False)):
        probe = ["--probe", f"http://127.0.0.1:{server.port}"]
        ran = CliRunner().invoke(app, ["verify", "--checkpoint", str(model), "--json", *probe])
        assert ran.exit_code == (0 if ok else 1), ran.output
        told = json.loads(ran.stdout)
        assert [replica["ok"] for replica in told["replicas"]] == [ok]
        assert told["probe"]["tokens"] == 4 * 31
        assert (told["probe"]["largest_difference"] < 0.01) is ok, told["probe"]
