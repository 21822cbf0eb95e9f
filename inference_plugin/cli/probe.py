"""`weightwire verify --probe`: compares a server's log-probabilities of fixed prompts with those of the checkpoint in
`transformers`."""

from __future__ import annotations

import http.client
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from inference_plugin.cli.output import stop

if TYPE_CHECKING:
    import torch

__all__ = ["Probe", "probe"]

PROMPTS = 4
PROMPT_TOKENS = 32


class Probe(msgspec.Struct, frozen=True):
    """How far the log-probabilities of the prompts' tokens lie apart, server and checkpoint, in nats."""

    url: str
    tokens: int
    mean_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.url}: log-probabilities of {self.tokens} tokens differ from the checkpoint's by "
            f"{self.mean_difference:.4f} on average, {self.largest_difference:.4f} at most"
        )


def probe(url: str, directory: Path, timeout_s: float) -> Probe:
    """Asks the vLLM or SGLang server at `url`. Ends the command where one of the two can't answer."""
    model = _model_of(directory)
    prompts = _prompts(int(model.config.get_text_config().vocab_size))
    try:
        server = _Server(url.rstrip("/"), timeout_s)
        told = [server.log_probabilities(prompt) for prompt in prompts]
    except (LookupError, TypeError, ValueError) as error:
        raise stop(f"{url} answers otherwise than vLLM's or SGLang's server would: {error!r}") from None
    apart = [
        abs(one - other)
        for prompt, answer in zip(prompts, told, strict=True)
        for one, other in zip(answer, _of_checkpoint(model, prompt), strict=True)
    ]
    return Probe(url, len(apart), sum(apart) / len(apart), max(apart))


def _prompts(vocabulary: int) -> list[list[int]]:
    """The same in every run, with ids from all over the vocabulary but its first ones, which are often special."""
    usual = max(vocabulary - 16, 1)
    return [[16 + (7919 * (i + 1) + 104729 * k * k) % usual for i in range(PROMPT_TOKENS)] for k in range(PROMPTS)]


def _model_of(directory: Path) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise stop("--probe needs transformers: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True).eval()
    except Exception as error:  # noqa: BLE001 -- whatever transformers can't load, there is no model to compare with
        raise stop(f"{directory} can't be loaded by transformers, which --probe asks: {error}") from None


def _of_checkpoint(model: Any, prompt: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, given those before it."""
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1].float()
    chosen = torch.tensor(prompt[1:])[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found


class _Server:
    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        served = self._ask("/v1/models")["data"][0]
        self._name = served["id"]
        self._is_sglang = served.get("owned_by") == "sglang"

    def log_probabilities(self, prompt: Sequence[int]) -> list[float]:
        """As `_of_checkpoint`."""
        if self._is_sglang:
            body = {
                "input_ids": list(prompt),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            return [float(each[0]) for each in self._ask("/generate", body)["meta_info"]["input_token_logprobs"][1:]]
        body = {"model": self._name, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        told = self._ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [float(each[str(token)]["logprob"]) for token, each in zip(prompt[1:], told[1:], strict=True)]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise stop(f"{self._url}{path} answers {error.code}: {error.read(500).decode(errors='replace')}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise stop(f"{self._url}{path} does not answer as vLLM's or SGLang's server would: {error}") from None
