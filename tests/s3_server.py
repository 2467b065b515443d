"""moto's S3 server in a process of its own, with faults to order: `with running(folder) as server`.

It answers one request after the other, so that a conditional PUT is one step, as it is on S3 (moto's own threads look first and
write then). Objects whose names contain `flaky` are there at the third request only, `down` never: 503 until then.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_BUSY = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>Reduce your rate.</Message></Error>"
_WAIT_S = 120.0


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path  # where orders are left

    def bucket(self) -> str:
        """s3:// of a new bucket."""
        import s3fs

        name = f"bucket-{uuid.uuid4().hex[:8]}"
        s3fs.S3FileSystem().mkdir(name)
        return f"s3://{name}"

    def stall(self, name: str) -> None:
        """The next PUT of an object whose name contains `name` is not answered until `go`, and nothing is kept of it."""
        (self.folder / "stall").write_text(name)

    def wait_for_stalled(self) -> None:
        _wait(self.folder / "stalled")

    def go(self) -> None:
        (self.folder / "go").touch()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server on a free port of loopback, and this process's environment for it: credentials, and a cache in `folder`."""
    with (
        subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            own = {
                "ENDPOINT_URL": url,
                "ACCESS_KEY_ID": "key",
                "SECRET_ACCESS_KEY": "secret",
                "DEFAULT_REGION": "us-east-1",
            }
            for name, value in own.items():
                patch.setenv(f"AWS_{name}", value)
            patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            forget_clients()
            yield Server(url, folder)
        finally:
            process.kill()
            forget_clients()


def forget_clients() -> None:
    """A client keeps the address and the credentials that it was made with."""
    import s3fs

    from tune_prune.core import store as object_storage

    object_storage._client.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def _wait(path: Path) -> None:
    end = time.monotonic() + _WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.01)


def _faulty(app: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    seen: collections.Counter[str] = collections.Counter()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        name = environ["PATH_INFO"]
        seen[name] += 1
        order = folder / "stall"
        if environ["REQUEST_METHOD"] == "PUT" and order.exists() and order.read_text() in name:
            order.unlink()
            (folder / "stalled").touch()
            _wait(folder / "go")
        elif "down" not in name and ("flaky" not in name or seen[name] > 2):
            return app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(
            "503 Service Unavailable", [("Content-Type", "application/xml"), ("Content-Length", str(len(_BUSY)))]
        )
        return [_BUSY]

    return answer


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app = _faulty(DomainDispatcherApplication(create_backend_app), Path(sys.argv[1]))
    server = make_server("127.0.0.1", 0, app, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # a line for every request
    server.serve_forever()


if __name__ == "__main__":
    main()
