"""Object storage over the protocol of S3, to a small server of this process."""

import re
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.kv_storage import KvStorage
from mcore_parallel.layout import LayoutTensor, TensorLayout


class Bucket(BaseHTTPRequestHandler):
    """What of S3 tensorstore asks for: objects, parts of them, and lists by prefix."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    read_whole: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket").removeprefix("/")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[self.key] = data
        self.answer(200, ETag=f'"{md5(data).hexdigest()}"')

    def do_DELETE(self) -> None:
        self.objects.pop(self.key, None)
        self.answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            keys = sorted(key for key in self.objects if key.startswith(query["prefix"][0]))
            rows = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)
            head = f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>"
            self.answer(200, f"<ListBucketResult>{head}{rows}</ListBucketResult>".encode())
        elif not self.key:
            self.answer(200, x_amz_bucket_region="us-east-1")
        elif self.key not in self.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send_object(self.objects[self.key])

    def send_object(self, data: bytes) -> None:
        tag = f'"{md5(data).hexdigest()}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.read_whole.append(self.key)
            self.answer(200, data, ETag=tag)
            return
        start = int(asked[1])
        stop = min(int(asked[2]) + 1 if asked[2] else len(data), len(data))
        if start >= len(data):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        place = f"bytes {start}-{stop - 1}/{len(data)}"
        self.answer(206, data[start:stop], ETag=tag, Content_Range=place)


@pytest.fixture
def bucket() -> Iterator[KvStorage]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Bucket.objects.clear()
    spec = {
        "driver": "s3",
        "bucket": "bucket",
        "path": "runs/demo/",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
        "endpoint": f"http://127.0.0.1:{server.server_port}",
    }
    try:
        yield KvStorage(spec)
    finally:
        server.shutdown()
        server.server_close()


def test_saved_kept_found_and_read(bucket: KvStorage) -> None:
    """U49: retention and the marker; sizes are looked at without fetching any chunk whole."""
    layout = TensorLayout.whole("model/w", (50, 60))
    value = torch.arange(3000.0).view(50, 60)
    for step in (1, 2, 3):
        tensors = {"w": LayoutTensor(value + step, layout)}
        mcore_ckpt.save(
            "run", step=step, tensors=tensors, storage=bucket, chunk_bytes=4096, keep_last=2
        )
    assert sorted(bucket.entries("")) == ["step_00000002", "step_00000003"]
    assert torch.equal(mcore_ckpt.open("", storage=bucket)["model/w"], value + 3)
    assert not mcore_ckpt.verify("", storage=bucket).problems
    assert re.fullmatch(r"http://127.0.0.1:\d+/bucket/runs/demo/x", bucket.location("x"))
    Bucket.read_whole.clear()
    found = mcore_ckpt.find("", storage=bucket, scan="quick")
    assert found is not None
    assert found.step == 3
    assert not [key for key in Bucket.read_whole if "/c." in key]
    chunk = "runs/demo/step_00000003/model/w/c.0.0"
    for damaged in (Bucket.objects[chunk][:-1], Bucket.objects[chunk] + b"x", b""):
        Bucket.objects[chunk] = damaged
        with pytest.warns(RuntimeWarning, match=f"has {len(damaged)} bytes instead of"):
            older = mcore_ckpt.find("", storage=bucket, scan="quick")
        assert older is not None
        assert older.step == 2
