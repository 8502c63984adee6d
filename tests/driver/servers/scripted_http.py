# ruff: noqa: A002, T201
"""HTTP servers that misbehave: `scripted_http.py BEHAVIOUR TOKEN` prints its URL. Without the SDK."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BEHAVIOUR = sys.argv[1]
SESSION = "s-1"
seen: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, number = message["method"], message.get("id")
        seen.append(f"{method} {self.headers['Mcp-Session-Id']} {self.headers['MCP-Protocol-Version']}")
        if BEHAVIOUR == "moved" and self.path == "/mcp":
            self.answer(307, b"", Location="/mcp/")
        elif BEHAVIOUR == "elsewhere":
            self.answer(307, b"", Location="http://127.0.0.2:1/mcp")
        elif number is None:
            self.answer(202, b"")
        elif method == "initialize":
            server = {"name": BEHAVIOUR, "version": "0"}
            result: dict[str, Any] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": server,
            }
            self.reply(number, result, **{"Mcp-Session-Id": SESSION})
        elif method == "tools/list":
            self.reply(number, {"tools": []})
        else:
            self.call(number, message["params"]["name"])

    def call(self, number: int, tool: str) -> None:
        reply = {"jsonrpc": "2.0", "id": number, "result": {"x-unknown": 1.10}}
        if tool == "seen":
            self.reply(number, {"seen": seen})
        elif tool == "pretty":
            self.answer(200, json.dumps(reply, indent=2).replace("\n", "\r\n").encode())
        elif tool == "other":
            self.reply(number + 1000, {})
        elif tool == "nan":
            self.answer(200, b'{"jsonrpc":"2.0","id":%d,"result":NaN}' % number)
        elif tool == "fault":
            self.answer(500, b"it broke")
        elif tool == "error":
            error = {"jsonrpc": "2.0", "id": number, "error": {"code": -5, "message": "as a reply"}}
            self.answer(400, json.dumps(error).encode())
        elif tool == "expired":
            self.answer(404, b"")
        elif tool == "html":
            self.answer(200, b"<html>", **{"Content-Type": "text/html"})
        elif tool == "cut":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"jsonrpc"')
            self.close_connection = True
        elif tool == "events":
            self.begin_events()
            data = json.dumps(reply, indent=1).splitlines()
            self.wfile.write(b": comment\r\nevent: message\r\n")
            for line in data:
                self.wfile.write(b"data: " + line.encode() + b"\r\n")
            self.wfile.write(b"\r\n")
        elif tool == "silence":
            self.begin_events()
        elif tool == "resumed":
            self.begin_events()
            self.wfile.write(b"id: e%d\nretry: 10\ndata:\n\n" % number)
        elif tool == "overlong":
            self.begin_events()
            self.wfile.write(b"data: ")
            for _ in range(65):
                self.wfile.write(b"x" * (1 << 20))
            self.wfile.write(b"\n\n")

    def do_GET(self) -> None:
        last = self.headers["Last-Event-ID"]
        if last is None:
            self.answer(405, b"")
            return
        reply = {"jsonrpc": "2.0", "id": int(last[1:]), "result": {"resumed": True}}
        self.begin_events()
        self.wfile.write(b"data: " + json.dumps(reply).encode() + b"\n\n")

    def do_DELETE(self) -> None:
        print(f"DELETE {self.headers['Mcp-Session-Id']}", flush=True)
        self.answer(200, b"")

    def reply(self, number: Any, result: Any, **headers: str) -> None:
        self.answer(200, json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode(), **headers)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_address[1]}/mcp", flush=True)
server.serve_forever()
