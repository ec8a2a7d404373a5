"""A hub on this machine: the HTTP endpoints that huggingface_hub asks for a model's files, over a real socket.

A repository is a directory; its one commit is a fixed hash. Point a client at it with HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer: a status in its place, or the connection cut after so many bytes."""

    status: int | None = None
    cut: int | None = None
    after: str | None = None


@dataclass
class Repository:
    """A model repository. token: what a client must send, None for a public one. gated: whether even that is refused
    as gated. revisions: the names that are its commit. ranges: whether a part of a file can be asked for. storage: the
    URL of another server that weights are sent from, by a redirect. faults: what becomes of the next requests for
    weights, in order: a status that is answered, or how many bytes are sent before the connection is cut."""

    root: Path
    token: str | None = None
    gated: bool = False
    revisions: tuple[str, ...] = ("main", COMMIT)
    ranges: bool = True
    storage: str | None = None
    faults: list[Fault] = field(default_factory=list)


@dataclass
class Hub:
    """A running hub. requests: (method, path, authorization) of everything asked. sent: file -> bytes of it."""

    url: str
    sent: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@contextmanager
def running(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """A hub that serves `repositories` (id -> repository) until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Authorization")))
            for name, repository in repositories.items():
                if path.startswith((f"/api/models/{name}/", f"/{name}/resolve/")) or path == f"/api/models/{name}":
                    self.in_repository(name, repository, path, body)
                    return
            # The hub tells an anonymous client of an unknown repository what it tells of a private one.
            anonymous = self.headers.get("Authorization") is None
            self.refuse(401 if anonymous else 404, "RepoNotFound", "Repository not found")

        def in_repository(self, name: str, repository: Repository, path: str, body: bool) -> None:
            allowed = repository.token is None or self.headers.get("Authorization") == f"Bearer {repository.token}"
            is_file = path.startswith(f"/{name}/resolve/")
            if not allowed and not repository.gated:
                self.refuse(401, "RepoNotFound", "Repository not found")
                return
            if not allowed and is_file:
                self.refuse(403, "GatedRepo", "Access to this model is restricted")
                return
            rest = path.removeprefix(f"/{name}/resolve/" if is_file else f"/api/models/{name}")
            if is_file:
                revision, _, file = rest.partition("/")
            else:
                kind, _, revision = rest.strip("/").partition("/")
                revision, _, file = (revision or "main").partition("/")
                if kind not in ("", "revision", "tree"):
                    self.refuse(404, "EntryNotFound", "no such endpoint")
                    return
            if revision not in repository.revisions:
                self.refuse(404, "RevisionNotFound", "Invalid rev id")
            elif is_file:
                self.send_file(repository, file, body)
            elif kind == "tree":
                listed = [
                    {"type": "file", "path": item, "size": (repository.root / item).stat().st_size, "oid": "0" * 40}
                    for item in files(repository.root)
                ]
                self.send(200, json.dumps(listed).encode(), body, {"Content-Type": "application/json"})
            else:
                info = {
                    "_id": "1",
                    "id": name,
                    "modelId": name,
                    "sha": COMMIT,
                    "private": repository.token is not None,
                    "gated": "manual" if repository.gated else False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [{"rfilename": item} for item in files(repository.root)],
                }
                self.send(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})

        def send_file(self, repository: Repository, file: str, body: bool) -> None:
            path = repository.root / file
            if not path.is_file():
                self.refuse(404, "EntryNotFound", "Entry not found")
                return
            headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            weights = file.endswith(".safetensors")
            if weights and repository.storage is not None:
                linked = {"X-Linked-Size": str(path.stat().st_size), "X-Linked-ETag": headers["ETag"]}
                self.send(302, b"", body, headers | linked | {"Location": f"{repository.storage}{self.path}"})
                return
            data, status = path.read_bytes(), 200
            asked = self.headers.get("Range")
            if asked and repository.ranges:
                first, last = asked.removeprefix("bytes=").split("-")
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[int(first) : int(last) + 1], 206
            with lock:
                fault = repository.faults.pop(0) if weights and body and repository.faults else None
            if fault is not None and fault.status is not None:
                after = {} if fault.after is None else {"Retry-After": fault.after}
                self.send(fault.status, b"", body, after)
                return
            self.send(status, data, body, headers, None if fault is None else fault.cut)
            if body:
                with lock:
                    sent = len(data) if fault is None or fault.cut is None else min(fault.cut, len(data))
                    hub.sent[file] = hub.sent.get(file, 0) + sent

        def refuse(self, status: int, code: str, message: str) -> None:
            self.send(status, b"{}", True, {"X-Error-Code": code, "X-Error-Message": message})

        def send(
            self, status: int, data: bytes, body: bool, headers: Mapping[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(data[:cut])
            if cut is not None and cut < len(data):
                self.close_connection = True

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
