"""A Hugging Face hub for the real huggingface_hub, in a thread: `with running() as hub`; `hub.environment` leads a process to it.

It has what whoami, create_repo, model_info, create_commit (git and LFS files) and hf_hub_download ask. A commit takes only LFS
files that were uploaded whole before. Of the tokens READER may not write, and the uploads of UNLUCKY are cut off in their middle.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

WRITER, READER, UNLUCKY = "hf_writer_of_this_test", "hf_reader_of_this_test", "hf_unlucky_of_this_test"
_NAME = r"([\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    private: bool = True
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"* -text\n"})
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return f"{len(self.commits):040x}"


@dataclass
class Hub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS files by SHA-256

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that has this hub, no token, and a cache below `home`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}  # as commands do
        return environment | {"HF_HUB_DISABLE_XET": "1"}  # LFS: of xet's storage there is no server to test with


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        path = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length") or 0)
        if path.startswith("/storage/"):  # signed addresses, without a token
            return self._take(path, length)
        body, self.token = self.rfile.read(length), (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.token not in (WRITER, READER, UNLUCKY):
            return self._answer(401, {"error": "Invalid username or password."})
        for method, pattern, answer in _ROUTES:
            if method in (self.command, self.command.replace("HEAD", "GET")) and (match := re.fullmatch(pattern, path)):
                return answer(self, body, *match.groups())
        return self._answer(404, {"error": f"no {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _take(self, path: str, length: int) -> None:
        _, _, token, oid = path.split("/")
        if token == UNLUCKY:
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        data = self.rfile.read(length)
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.stored[oid] = data
        self._answer(200, {})

    def _whoami(self, _: bytes) -> None:
        token = {"accessToken": {"role": "read" if self.token == READER else "write"}}
        self._answer(200, {"type": "user", "name": "anna", "orgs": [{"name": "acme"}], "auth": token})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.hub.repos
        if not there:
            self.hub.repos[name] = Repo(asked.get("visibility", "public") == "private" or asked.get("private", False))
        self._answer(409 if there else 200, {"url": f"{self.hub.url}/{name}"})

    def _repo(self, name: str) -> Repo | None:
        if name not in self.hub.repos:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return self.hub.repos.get(name)

    def _info(self, _: bytes, name: str) -> None:
        if (repo := self._repo(name)) is not None:
            about = {"id": name, "sha": repo.sha, "private": repo.private, "tags": [], "downloads": 0, "likes": 0}
            self._answer(200, about | {"siblings": [{"rfilename": file} for file in repo.files]})

    def _validate(self, body: bytes) -> None:
        metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        errors = [] if isinstance(metadata, dict) and metadata.get("tags") else [{"message": "no metadata"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, body: bytes, name: str) -> None:
        def mode(file: str) -> str:
            return "lfs" if file.endswith((".safetensors", ".gguf", ".png")) else "regular"

        files = [
            {"path": file["path"], "uploadMode": mode(file["path"]), "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, body: bytes, name: str) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.hub.url}/storage/{self.token}/{one['oid']}"}}
            objects.append(one if one["oid"] in self.hub.stored else one | {"actions": action})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, body: bytes, name: str) -> None:
        repo = self.hub.repos[name]
        files, message = dict(repo.files), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
                assert len(files[value["path"]]) == value["size"]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repo.files = files
        repo.commits.append(message)
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha})

    def _settings(self, body: bytes, name: str) -> None:
        asked = json.loads(body)
        self.hub.repos[name].private = asked.get("visibility") == "private" or asked.get("private", False)
        self._answer(200, {})

    def _file(self, _: bytes, name: str, file: str) -> None:
        if (repo := self._repo(name)) is not None:
            self._send(repo.files.get(file), repo.sha)

    def _send(self, content: bytes | None, commit: str) -> None:
        if content is None:
            return self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._answer(200, content, X_Repo_Commit=commit, ETag=etag)


_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", _Handler._whoami),
    ("POST", "/api/repos/create", _Handler._create),
    ("GET", f"/api/models/{_NAME}", _Handler._info),
    ("GET", f"/api/models/{_NAME}/revision/[^/]+", _Handler._info),
    ("POST", "/api/validate-yaml", _Handler._validate),
    ("POST", f"/api/models/{_NAME}/preupload/main", _Handler._preupload),
    ("POST", f"/{_NAME}.git/info/lfs/objects/batch", _Handler._batch),
    ("POST", f"/api/models/{_NAME}/commit/main", _Handler._commit),
    ("PUT", f"/api/models/{_NAME}/settings", _Handler._settings),
    ("GET", f"/{_NAME}/resolve/[^/]+/(.+)", _Handler._file),
]
