"""An OpenTelemetry collector for tests: a line of JSON for every span it gets.

python collector.py ADDRESS PORT FILE
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def spans(body: bytes) -> Iterator[dict[str, str]]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        named = {each.key: each.value.string_value for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "service": named["service.name"],
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "span": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                }


def collector(address: str, port: int, file: Path) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with file.open("a") as out:
                out.write("".join(json.dumps(span) + "\n" for span in spans(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer((address, port), Handler)


if __name__ == "__main__":
    collector(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])).serve_forever()
