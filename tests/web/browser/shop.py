"""Stand-ins for sites that need a browser: what they answer differs each time that they are asked."""

from __future__ import annotations

import itertools
import json
import ssl
from collections.abc import Mapping
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

SHOP = "shop.example.org"
STOCK = "stock.example.net"
PINNED = "accounts.google.com"
"""Chromium has a list of the authorities that may certify this name."""
TEAS = (Path(__file__).parent / "suite/tasks/finalpool/buy-tea/groundtruth_workspace/teas.csv").read_bytes()
_ICON = "<!doctype html><link rel=icon href=data:,>"
"""Without it, the browser asks for /favicon.ico or not, as it has time."""
_HOME = (
    _ICON
    + """<title>Tea</title><h1>Tea</h1>
<p>{greeting}</p><ul id="facts"></ul><p id="state">loading</p>
<a href="/teas.csv">List of teas</a> <a href="http://shop.example.org/about">About</a>
<a href="/riddle">Riddle</a> <script src="/shop.js"></script>"""
)
_SCRIPT = """
const show = text => document.getElementById("facts").append(
    Object.assign(document.createElement("li"), {textContent: text}));
const ask = async (name, address, options) => {
  try {
    const response = await fetch(address, options);
    show(`${name}: ${response.status} ${await response.text()}`);
  } catch (error) { show(`${name}: failed`); }
};
const socket = () => new Promise(resolve => {
  const opened = new WebSocket("wss://shop.example.org/socket");
  opened.onopen = () => resolve("socket: open");
  opened.onerror = () => resolve("socket: failed");
});
(async () => {
  document.cookie = "theme=dark";
  show(`theme: ${document.cookie.includes("theme=dark")}`);
  await ask("cache buster", `/api/level?_=${Date.now()}`);
  await ask("time", `/api/level?at=${Date.now()}`);
  await ask("fraction", `/api/level?lot=${Math.random()}`);
  await ask("first", "/api/level?kind=basket", {method: "POST", body: JSON.stringify({tea: "Assam"}),
    headers: {"Content-Type": "application/json"}});
  await ask("second", "/api/level?kind=basket", {method: "POST", body: JSON.stringify({tea: "Assam"}),
    headers: {"Content-Type": "application/json"}});
  await ask("other site", "https://stock.example.net/level", {headers: {"X-Shop": "tea"}});
  await ask("pinned site", "https://accounts.google.com/level");
  show(await socket());
  navigator.sendBeacon("https://www.google-analytics.com/collect", String(Math.random()));
  await navigator.serviceWorker.register("/worker.js");
  await navigator.serviceWorker.ready;
  if (!navigator.serviceWorker.controller)
    await new Promise(resolve => navigator.serviceWorker.oncontrollerchange = resolve);
  await ask("worker", "/from-worker");
  document.getElementById("state").textContent = "complete";
})();
"""
_WORKER = """
self.addEventListener("install", event => event.waitUntil(
  caches.open("tea").then(cache => cache.add("/api/level?kind=cached")).then(() => self.skipWaiting())));
self.addEventListener("activate", event => event.waitUntil(clients.claim()));
self.addEventListener("fetch", event => {
  if (new URL(event.request.url).pathname == "/from-worker")
    event.respondWith(caches.match("/api/level?kind=cached"));
});
"""
_RIDDLE = (
    _ICON
    + """<title>Riddle</title><p id="answer">loading</p><script>
fetch(`/api/riddle/${crypto.randomUUID()}`).then(async response =>
    document.getElementById("answer").textContent = `${response.status} ${await response.text()}`);
</script>"""
)


NONE: Mapping[str, str] = MappingProxyType({})
HEADERS = {
    "Cache-Control": "no-store",
    "Access-Control-Allow-Origin": "*",
    "Alt-Svc": 'h3=":443"; ma=86400',  # nothing listens for HTTP/3
    "Strict-Transport-Security": "max-age=86400",
}


class ShopHandler(BaseHTTPRequestHandler):
    """The shop, its other hosts, and a page that has a new number each time."""

    protocol_version = "HTTP/1.1"
    numbers = itertools.count(1000)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not isinstance(self.connection, ssl.SSLSocket):
            self._answer("", status=301, headers={"Location": f"https://{self.headers['Host']}{self.path}"})
        elif path == "/":
            self._home()
        elif path == "/socket":
            self._answer("no sockets", status=400)
        elif path == "/teas.csv":
            attached = {"Content-Disposition": "attachment; filename=teas.csv"}
            self._answer(TEAS.decode(), "text/csv", headers=attached)
        else:
            number = next(self.numbers)
            texts = {
                "/shop.js": (_SCRIPT, "text/javascript"),
                "/worker.js": (_WORKER, "text/javascript"),
                "/riddle": (_RIDDLE, "text/html"),
                "/about": (f"{_ICON}<h1>About</h1><p>Visitor {number}</p>", "text/html"),
            }
            self._answer(*texts.get(path, (f"{number}", "text/plain")))

    def do_POST(self) -> None:
        tea = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tea"]
        self._answer(f"{tea} {next(self.numbers)}")

    def do_OPTIONS(self) -> None:
        self._answer("", headers={"Access-Control-Allow-Headers": "X-Shop"})

    def _home(self) -> None:
        """Greet a visitor by the cookie that comes with a redirect to the same address."""
        visitor = SimpleCookie(self.headers["Cookie"]).get("visitor")
        if visitor is None:
            cookie = f"visitor={next(self.numbers)}; Secure; HttpOnly"
            self._answer("", status=302, headers={"Location": "/", "Set-Cookie": cookie})
        else:
            self._answer(_HOME.format(greeting=f"Welcome back, visitor {visitor.value}"), "text/html")

    def _answer(
        self, text: str, kind: str = "text/plain", *, status: int = 200, headers: Mapping[str, str] = NONE
    ) -> None:
        body = text.encode()
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS, **headers}
        for name, value in own.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
