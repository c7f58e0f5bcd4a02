"""A small server of objects in the S3 way (GET with ranges, HEAD), with faults to plant."""

import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectServer:
    """Serves `objects` by path, such as `/bucket/key`; each request takes the next of `faults`.

    A fault is a status (`404`), `drop` (the connection ends without an answer), `cut` (half of the
    body comes), `short` (a whole answer with less than was asked for), or None.
    """

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.faults: deque = deque()
        self.requests: list[tuple[str, str, str | None]] = []
        self.signed = 0
        self.weak = ""  # or what marks a tag that promises no equal bytes
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer()

            def do_GET(self):
                self.answer()

            def log_message(self, *args):
                pass

            def answer(self):
                path = self.path.partition("?")[0]
                span = self.headers.get("Range")
                owner.requests.append((self.command, path, span))
                owner.signed += "AWS4-HMAC-SHA256" in self.headers.get("Authorization", "")
                fault = owner.faults.popleft() if owner.faults else None
                body = owner.objects.get(path)
                if fault == "drop":
                    self.close_connection = True
                    return
                if isinstance(fault, int) or body is None:
                    self.send_response(fault or 404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                tag = f'"{hash(body)}"'
                if self.headers.get("If-Match", tag) != tag:
                    self.send_response(412)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                whole = len(body)
                self.send_response(206 if span else 200)
                if span:
                    first, last = (int(word) for word in span.removeprefix("bytes=").split("-"))
                    body = body[first : last + 1]
                    if fault == "short":
                        body = body[: len(body) // 2]
                    last = first + len(body) - 1
                    self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", owner.weak + tag)
                self.send_header("Last-Modified", "Mon, 30 Nov 2026 10:00:00 GMT")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
                if fault == "cut":
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
