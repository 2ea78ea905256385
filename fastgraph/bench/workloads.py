"""What is asked of an engine in a bench: seeded workloads, or a user's own in a JSONL file.

The prompts are random token ids, since a step costs the same whatever the text says, and end-of-text is ignored, so
that lengths are what was drawn. The same seed gives the same requests everywhere: figures can be compared.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgraph.errors import ConfigError, RequestError
from fastgraph.loading.tokenizer import Tokenizer

_LOWEST, _HIGHEST = 10, 30_000  # ids of random prompts: above the special tokens, within every model's vocabulary
_DEFAULT_MAX_TOKENS = 256  # of a line in a user's file that does not say


@dataclass(frozen=True, slots=True)
class Turn:
    """A request. Its prompt is everything said in the session before, then `ids`."""

    ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool = True


Session = Sequence[Turn]  # each turn waits for the answer to the one before
Workload = Sequence[Session]  # sessions come all at once


def latency(n_in: int = 128, n_out: int = 256, seed: int = 0, batch: int = 1) -> Workload:
    """`batch` requests of one length."""
    chance = random.Random(seed)
    return [[Turn(_ids(chance, n_in), n_out)] for _ in range(batch)]


def chat(requests: int = 1000, seed: int = 0) -> Workload:
    """First questions of a public chat service: log-normal lengths with a long tail, nothing shared."""
    chance = random.Random(seed)
    sessions = []
    for _ in range(requests):
        ids = _ids(chance, _length(chance, 120, 1.1, 4, 2048))
        sessions.append([Turn(ids, _length(chance, 180, 0.8, 4, 1024))])
    return sessions


def repeated_sampling(prompts: int = 16, samples: int = 128, n_in: int = 1000, seed: int = 0) -> Workload:
    """Many answers to each of a few prompts: everything but the answers is shared."""
    chance = random.Random(seed)
    sessions = []
    for _ in range(prompts):
        ids = _ids(chance, n_in)
        sessions += [[Turn(ids, _length(chance, 160, 0.5, 16, 512))] for _ in range(samples)]
    return sessions


def multi_turn(
    sessions: int = 16, turns: int = 4, first: int = 8000, later: int = 400, n_out: int = 300, seed: int = 0
) -> Workload:
    """Agents at work: a long first prompt, then short turns on the whole history."""
    chance = random.Random(seed)
    return [[Turn(_ids(chance, later if turn else first), n_out) for turn in range(turns)] for _ in range(sessions)]


def from_file(path: Path, tokenizer: Tokenizer | None, vocab: int) -> Workload:
    """A user's requests, one JSON object a line: `{"prompt": text or token ids, "max_tokens": n}`.

    Answers end where the model ends them. Raises `ConfigError` that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # and at nothing else, which a text may have in it
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the workload {path} cannot be read: {error}") from error
    sessions = [
        [_turn(f"{path}, line {number}", line, tokenizer, vocab)]
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not sessions:
        raise ConfigError(f"the workload {path} has no requests in it")
    return sessions


def _turn(where: str, line: str, tokenizer: Tokenizer | None, vocab: int) -> Turn:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict) or not entry.keys() <= {"prompt", "max_tokens"} or "prompt" not in entry:
        raise ConfigError(f'{where}: a request is {{"prompt": text or token ids, "max_tokens": number}}')
    prompt, limit = entry["prompt"], entry.get("max_tokens", _DEFAULT_MAX_TOKENS)
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"{where}: max_tokens must be a positive whole number, not {limit!r}")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(f"{where}: the prompt is text, and this model was loaded without a tokenizer")
        try:
            prompt = tokenizer.encode(prompt)
        except RequestError as error:
            raise ConfigError(f"{where}: {error}") from error
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int and 0 <= i < vocab for i in prompt):
        raise ConfigError(f"{where}: a prompt is text or a list of token ids below {vocab}, and not empty")
    return Turn(prompt, limit, ignore_eos=False)


def _ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(_LOWEST, _HIGHEST) for _ in range(count)]


def _length(chance: random.Random, median: float, sigma: float, shortest: int, longest: int) -> int:
    """From a log-normal distribution, cut off at both ends."""
    drawn = int(math.exp(chance.gauss(math.log(median), sigma)))
    return min(max(drawn, shortest), longest)
