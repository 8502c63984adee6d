"""Who may look at the page, and which requests are served at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator
from functools import partial
from itertools import product
from pathlib import Path

import anyio
import pytest
from starlette.requests import HTTPConnection

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.page import access
from decathlon_mcp.plugins.page.access import (
    MAX_FORM_BYTES,
    MAX_SESSIONS,
    PageKey,
    Sessions,
    load_or_create_page_key,
)
from decathlon_mcp.plugins.page.site import MAX_LONG_FORMS, SHORT_FORM_BYTES
from tests.history.stored_episodes import Folder
from tests.http.messages import tokens_of
from tests.page.sites import HOST, KEY, browser, outline, page_over, sign_in, signed_in

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WRONG_SECONDS", 0.01)


def test_the_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    key = load_or_create_page_key(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert load_or_create_page_key(tmp_path) == key
    file = tmp_path / "page-key"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_or_create_page_key(tmp_path)


async def test_the_key_opens_a_session_and_a_wrong_one_does_not(state: Path) -> None:
    async with browser(page_over(state)) as client:
        assert (await client.get("/e/0123456789abcdef")).status_code == 401
        # A browser writes a 401 that it shows to its console.
        shown = await client.get("/e/0123456789abcdef", headers={"Sec-Fetch-Mode": "navigate"})
        assert (shown.status_code, 'id="enter"' in shown.text) == (200, True)
        assert f" view {state} --address" in shown.text
        wrong = await sign_in(client, "0e" * 32)
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        right = await sign_in(client, KEY)
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert cookie.startswith("decathlon-8765=")
        assert re.search(r"HttpOnly; Max-Age=43200; Path=/; SameSite=lax$", cookie)
        assert KEY not in cookie
        assert (await client.get("/no/such/page")).status_code == 404


async def test_signing_in_leads_to_the_address_that_was_asked_for_and_to_no_other_host(state: Path) -> None:
    async with browser(page_over(state)) as client:
        asked = await client.get("/e/0123456789abcdef?call=7&q=%22")
        assert 'value="/e/0123456789abcdef?call=7&amp;q=%22"' in asked.text
        own = "/e/0123456789abcdef?call=7"
        for path in (own, "//evil.example", "/\\evil.example", "https://evil.example", "x", "/\n/x", ""):
            right = await client.post("/page/session", data={"secret": KEY, "next": path})
            assert right.headers["location"] == (own if path == own else "/"), path


async def test_signing_out_ends_the_session(state: Path) -> None:
    async with signed_in(state) as client:
        cookies = dict(client.cookies)
        assert (await client.post("/page/leave")).status_code == 303
        client.cookies.update(cookies)
        assert (await client.get("/no/such/page")).status_code == 401


async def test_a_session_ends_after_twelve_hours_and_with_its_token(tmp_path: Path) -> None:
    now = 0.0

    class Removable:
        kind = "token"
        key = PageKey("secret")
        removed = False

        def principal_of(self, digest: str) -> access.Principal | None:
            return None if self.removed else self.key.principal_of(digest)

    accepted = Removable()
    app = page_over(tmp_path)
    app.site.sessions = Sessions(accepted, clock=lambda: now)
    async with browser(app) as client:
        await sign_in(client, "secret")
        now = 12 * 3600 - 1.0
        assert (await client.get("/no/such/page")).status_code == 404
        accepted.removed = True
        assert (await client.get("/no/such/page")).status_code == 401
        accepted.removed = False
        now += 1
        assert (await client.get("/no/such/page")).status_code == 401


async def test_one_token_cannot_end_the_sessions_of_another(tmp_path: Path) -> None:
    sessions = Sessions(tokens_of(tmp_path, ann="admin", bob="player"))
    ids = [await sessions.open(name) for name in ["ann", *["bob"] * (MAX_SESSIONS + 1)]]

    def is_open(session_id: str | None) -> bool:
        headers = [(b"cookie", f"decathlon-0={session_id}".encode())]
        return sessions.viewer(HTTPConnection({"type": "http", "headers": headers})) is not None

    assert [is_open(session_id) for session_id in ids] == [True, False, *[True] * MAX_SESSIONS]


async def test_a_tree_of_branches_has_only_what_the_token_may_see(tmp_path: Path) -> None:
    known = tokens_of(tmp_path, ann="controller", bob="controller", eve="admin")
    with Folder(tmp_path) as folder:

        def add(number: int, token: str, of: str | None = None) -> str:
            branch = {"episode": of, "at": 1} if of else None
            return folder.add(str(number) * 48, token=token, branch=branch)

        a = add(1, "ann")
        b, c = add(2, "ann", a), add(3, "bob", a)
        d = add(4, "bob", b)
    names = {a: "A", b: "B", c: "C", d: "D"}
    trees = {
        ("eve", b): ["✓ 1.00 A", "after call 1 · 2 branches", "  ✓ 1.00 B this episode replayed",
                     "  after call 1", "    ✓ 1.00 D replayed", "  ✓ 1.00 C replayed"],
        ("ann", b): ["✓ 1.00 A", "after call 1", "  ✓ 1.00 B this episode replayed"],
        ("bob", c): ["A is not here, or belongs to somebody else", "after call 1",
                     "  ✓ 1.00 C this episode replayed"],
        ("bob", d): ["B is not here, or belongs to somebody else", "after call 1",
                     "  ✓ 1.00 D this episode replayed"],
    }  # fmt: skip
    for (token, present), expected in trees.items():
        async with browser(page_over(tmp_path, tokens=known)) as client:
            await sign_in(client, token)
            assert outline((await client.get(f"/e/{present}")).text, names) == expected
            listed = (await client.get(f"/episodes?branch_of={a}")).text
            shown = {name for episode, name in names.items() if f'href="/e/{episode}"' in listed}
            assert shown == {"eve": {"B", "C"}, "ann": {"B"}, "bob": {"C"}}[token]


async def test_behind_a_proxy_addresses_have_its_prefix_and_the_cookie_is_secure(state: Path) -> None:
    public_url = "https://box.example/decathlon"
    async with browser(page_over(state, public_url=public_url)) as client:
        form = await client.get("/")
        assert 'action="/decathlon/page/session"' in form.text
        right = await sign_in(client, KEY)
        assert right.headers["location"] == "/decathlon/"
        assert "; Secure" in right.headers["set-cookie"]


CHANGES: list[tuple[dict[str, str], bool]] = [
    ({"Sec-Fetch-Site": "same-origin"}, True),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "none"}, False),
    ({"Origin": f"http://{HOST}"}, True),
    ({"Origin": "http://decathlon.localhost:8766"}, False),
    ({"Origin": "http://evil.example"}, False),
    ({"Origin": "null"}, False),
    ({"Sec-Fetch-Site": "same-site", "Origin": f"http://{HOST}"}, False),
    ({}, False),
]


async def test_a_change_is_accepted_from_the_page_only(state: Path) -> None:
    async with browser(page_over(state)) as client:
        del client.headers["Sec-Fetch-Site"]
        for headers, accepted in CHANGES:
            response = await client.post("/page/session", data={"secret": KEY}, headers=headers)
            assert response.status_code == (303 if accepted else 403), headers


async def test_a_change_behind_a_proxy_has_the_public_origin(state: Path) -> None:
    async with browser(page_over(state, public_url="https://box.example:443/decathlon")) as client:
        del client.headers["Sec-Fetch-Site"]
        for origin, status in (("https://box.example", 303), (f"http://{HOST}", 403)):
            response = await client.post("/page/session", data={"secret": KEY}, headers={"Origin": origin})
            assert response.status_code == status


async def test_every_response_has_the_headers(state: Path) -> None:
    paths = ("/no/such/page", "/page/live", "/page/assets/0/x.js")
    async with browser(page_over(state)) as client:
        for signed_in, path in product((False, True), paths):
            if signed_in:
                await sign_in(client, KEY)
            headers = (await client.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"


async def test_a_browser_at_an_mcp_address_is_led_to_the_page(state: Path) -> None:
    app = page_over(state)
    handle = "ab" * 24
    public_id = hashlib.sha256(handle.encode()).hexdigest()[:16]
    async with browser(app) as client:
        for path, target in (
            ("/mcp", "/"),
            ("/tasks/tune-reactor/mcp", "/episodes?task=tune-reactor"),
            (f"/episodes/{handle}/mcp", f"/e/{public_id}"),
        ):
            response = await client.get(path)
            assert (response.status_code, response.headers["location"]) == (303, target)
            assert response.headers["vary"] == "Accept"


ADDRESSES = [
    ("GET", "/", "text/html", True),
    ("GET", "/", "*/*", False),
    ("GET", "/", "application/json, text/html;q=0", False),
    ("GET", "/", "application/json, text/html;q=0.5", True),
    ("GET", "/mcp", "text/event-stream", False),
    ("POST", "/mcp", "text/html", False),
    ("POST", "/episodes", "text/html", False),
    ("GET", "/episodes", "text/html", True),
    ("GET", "/episodes/x/mcp", "text/event-stream", False),
    ("GET", "/metrics", "text/html", False),
    ("GET", "/e/0123456789abcdef", "*/*", True),
    ("POST", "/page/session", "*/*", True),
]


def test_programs_keep_their_addresses(tmp_path: Path) -> None:
    page = page_over(tmp_path)
    for method, path, accept, served in ADDRESSES:
        scope = {"type": "http", "method": method, "path": path, "headers": [(b"accept", accept.encode())]}
        assert page.serves(scope) is served, (method, path, accept)


async def test_a_long_form_of_somebody_unknown_is_not_read(state: Path) -> None:
    taken, size_bytes = 0, MAX_FORM_BYTES

    async def content() -> AsyncGenerator[bytes]:
        nonlocal taken
        for _ in range(0, size_bytes, 1 << 16):
            taken += 1
            yield b"x" * (1 << 16)

    async with browser(page_over(state)) as client:
        form = {"Content-Length": str(size_bytes), "Content-Type": "application/x-www-form-urlencoded"}
        response = await client.post("/page/session", content=content(), headers=form)
    assert response.status_code == 401
    assert taken == 0


async def test_long_forms_of_somebody_known_are_read_a_few_at_a_time(state: Path) -> None:
    app = page_over(state)
    begun, go_on = 0, anyio.Event()
    statuses: list[int] = []

    async def content() -> AsyncGenerator[bytes]:
        nonlocal begun
        begun += 1
        await go_on.wait()
        yield b"run=" + b"x" * SHORT_FORM_BYTES

    async with browser(app) as client:
        await sign_in(client, KEY)
        headers = {"Content-Length": f"{SHORT_FORM_BYTES + 4}"}

        async def send() -> None:
            statuses.append((await client.post("/page/run", content=content(), headers=headers)).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_LONG_FORMS + 3):
                tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            assert begun == MAX_LONG_FORMS
            go_on.set()
    assert statuses == [403] * (MAX_LONG_FORMS + 3)  # nothing can be changed here


async def test_long_forms_of_one_token_do_not_keep_those_of_another_waiting(
    state: Path, tmp_path: Path
) -> None:
    app = page_over(state, tokens=tokens_of(tmp_path, ada="controller", bob="controller"))

    async def content() -> AsyncGenerator[bytes]:
        await anyio.sleep_forever()
        yield b""

    headers = {"Content-Length": f"{SHORT_FORM_BYTES + 4}"}
    async with browser(app) as ada, browser(app) as bob, anyio.create_task_group() as tasks:
        await sign_in(ada, "ada")
        await sign_in(bob, "bob")
        for _ in range(MAX_LONG_FORMS + 1):
            tasks.start_soon(partial(ada.post, "/page/run", content=content(), headers=headers))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            answer = await bob.post("/page/run", content=b"run=" + b"x" * SHORT_FORM_BYTES)
        assert answer.status_code == 403  # nothing can be changed here
        tasks.cancel_scope.cancel()
