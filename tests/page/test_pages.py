"""What the pages show, over a state folder as servers leave it."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import httpx2
import pytest

from decathlon_mcp.plugins.history.list_episodes import show_episode
from decathlon_mcp.plugins.page import runs
from decathlon_mcp.types import public_id
from tests.history.stored_episodes import LIVE, NOW, Call, Folder, Note
from tests.page.sites import outline, signed_in

pytestmark = pytest.mark.anyio


async def text_of(client: httpx2.AsyncClient, path: str, status: int = 200) -> str:
    response = await client.get(path)
    assert response.status_code == status, response.text
    return response.text


def words(html: str) -> str:
    """The text between tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


async def test_episodes_without_a_run_are_on_the_front(state: Path) -> None:
    with Folder(state) as folder:
        played = folder.add("1" * 48)
    async with signed_in(state) as client:
        front = await text_of(client, "/")
        assert f'href="/e/{played}"' in front
        for page in (front, await text_of(client, "/runs")):
            assert "Nothing was played" not in page


async def test_the_front_shows_runs_and_the_latest_failures(state: Path) -> None:
    with Folder(state) as folder:
        folder.add("1" * 48, labels={"run": "alpha"}, task="won")
        failed = folder.add("2" * 48, labels={"run": "alpha"}, task="not-won", reward=0.25)
        lost = folder.add(
            "3" * 48, labels={"run": "beta"}, task="gone", reward=None, ending="its sandbox was lost"
        )
        # A client that looked at the server and left.
        folder.add("4" * 48, task="looked-at", reward=None, verdict=None, ending="closed by its client")
    with closing(sqlite3.connect(state / "store.db")) as connection, connection:
        connection.execute("UPDATE episodes SET verdict = NULL WHERE task = 'looked-at'")
    async with signed_in(state) as client:
        response = await client.get("/")
        assert response.headers["vary"] == "Accept"
        front = response.text
    assert f'href="/e/{failed}"' in front
    assert f'href="/e/{lost}"' in front
    assert 'href="/runs/alpha"' in front
    assert "50 %" in front
    assert "0.25" in front
    assert "its sandbox was lost" in front
    assert ">won<" not in front
    assert "looked-at" not in front


async def test_a_run_shows_every_attempt_by_task_and_its_failures_first(state: Path) -> None:
    with Folder(state) as folder:
        ids = [
            folder.add(
                f"{step}{attempt}" * 24,
                labels={"run": "a/b run", "step": str(step), "attempt": str(attempt)},
                task="one",
                reward=0.5 if step == 1 else 1.0,
                started_at=NOW + 10 * step + attempt,
            )
            for step in (1, 2)
            for attempt in (1, 2)
        ]
    async with signed_in(state) as client:
        run = await text_of(client, "/runs/a%2Fb%20run")
        await text_of(client, "/runs/unknown", 404)
    grid = run[run.index('id="tasks"') : run.index('id="episodes"')]
    assert re.findall(r"/e/([0-9a-f]{16})", grid) == ids
    assert grid.count("✓</a>") == 2
    episodes = run[run.index('id="episodes"') :]
    assert set(re.findall(r"/e/([0-9a-f]{16})", episodes)[:2]) == set(ids[:2])
    assert "step 1: reward 0.50" in run
    assert "pass@2" in run


async def test_every_table_is_sorted_by_a_link_in_its_heading(state: Path) -> None:
    with Folder(state) as folder:
        for number, (task, reward, calls) in enumerate((("b", 1.0, 3), ("c", 0.25, 1), ("a", 0.5, 2))):
            folder.add(
                f"{number}" * 48,
                task=task,
                reward=reward,
                labels={"run": f"run {task}" if number else "/&?#"},
                entries=[Call()] * calls,
                started_at=NOW + number,
            )
            folder.add(f"{number + 3}" * 48, task=task, reward=reward, labels={"run": "all"})
    async with signed_in(state) as client:

        async def click(page: str, section: str, heading: str) -> str:
            (link,) = re.findall(rf'<th[^>]*><a href="([^"]*)">{re.escape(heading)}</a>', part(page, section))
            return await text_of(client, unescape(link).partition("#")[0])

        def part(page: str, section: str) -> str:
            return page[page.index(section) :].partition("</table>")[0]

        def rows(page: str, section: str, path: str) -> list[str]:
            return re.findall(rf'<th scope="row"><a href="{path}[^"]*">([^<]*)</a>', part(page, section))

        page = await click(await text_of(client, "/episodes?show=failed"), "<h1", "calls")
        assert rows(page, "<h1", "/e/")[:2] == ["a", "c"]
        assert 'aria-sort="descending"' in page
        assert 'aria-sort="ascending"' in await click(page, "<h1", "calls")
        page = await click(await text_of(client, "/runs"), "<h1", "success")
        assert rows(page, "<h1", "/runs/") == ["/&amp;?#", "all", "run c", "run a"]
        page = await text_of(client, "/runs/all")
        assert rows(page, 'id="tasks"', "/episodes")[-1] == "b"
        page = await click(page, 'id="tasks"', "mean reward")
        assert rows(page, 'id="tasks"', "/episodes") == ["b", "a", "c"]
        page = await click(page, 'id="episodes"', "task")
        # The order of the other table stays.
        assert rows(page, 'id="tasks"', "/episodes") == ["b", "a", "c"]
        assert rows(page, 'id="episodes"', "/e/") == ["a", "b", "c"]
        for nonsense in ("--calls", "nonsense", "-", "suite;--"):
            assert 'aria-sort="descending"' in await text_of(client, f"/episodes?sort={nonsense}")


async def test_one_more_call_does_not_make_those_after_it_differ(state: Path) -> None:
    calls = [Call(arguments={"path": str(number)}) for number in range(12)]
    extra = [
        *calls[:6],
        Call(arguments={"path": "extra"}),
        *calls[6:11],
        Call(arguments={"path": "11"}, reply="new"),
    ]
    with Folder(state) as folder:
        a = folder.add("1" * 48, entries=calls, answer="the first answer")
        b = folder.add("2" * 48, entries=extra, answer="the second answer")
    async with signed_in(state) as client:
        pair = words(await text_of(client, f"/compare/episodes?a={a}&b={b}"))
    assert "11 calls are equal, 2 differ" in pair
    assert pair.count("only in B") == 1
    assert pair.count("another reply") == 1
    assert "4 equal calls" in pair
    assert pair.index("the first answer") < pair.index("the second answer") < pair.index("only in B")


async def test_what_the_agent_answered_and_why_it_failed_stand_together_above_the_calls(state: Path) -> None:
    verdict = {"evaluator_output": "FAIL: total is 3", "uncaught": "RuntimeError: no total"}
    with Folder(state) as folder:
        name = folder.add("1" * 48, reward=0.0, verdict=verdict, answer="The total is 3 <b>euros</b>.")
        long = folder.add("2" * 48, reward=0.0, answer="word " * 50_000)
    async with signed_in(state) as client:
        page = await text_of(client, f"/e/{name}")
        shown = words(page)
        told = ("The total is 3 ", "FAIL: total is 3", "RuntimeError: no total", "Prompt", "files__read_file")
        places = [shown.index(text) for text in told]
        assert places == sorted(places)
        assert "<b>euros" not in page
        assert "word word" in words(await text_of(client, f"/e/{long}"))


async def test_an_episode_shows_its_verdict_prompt_notes_and_calls(state: Path) -> None:
    entries = [Note("I read the file first."), Call(), Call(failed=True, reply="no such file", seconds=1.25)]
    verdict = {
        "metrics": {"found": 1.0, "exact": 0.5},
        "weights": {"found": 3, "exact": 1},
        "evaluator_output": "FAIL: exact",
    }
    with Folder(state) as folder:
        name = folder.add(
            "1" * 48, reward=0.875, success=False, entries=entries, verdict=verdict, labels={"model": "m 1"}
        )
    async with signed_in(state) as client:
        page = await text_of(client, f"/e/{name}")
        shown = words(page)
        for text in ("0.750", "0.125", "0.875", "FAIL: exact", "model=m 1", "namespaces", "Tune the reactor"):
            assert text in shown
        assert (
            shown.index("I read the file first.") < shown.index("name,amount") < shown.index("no such file")
        )
        assert 'id="c2"' in page
        assert "1.2 s" in shown
        downloaded = await client.get(f"/e/{name}/verdict.json")
        assert json.loads(downloaded.text)["episode"] == name
        assert "attachment" in downloaded.headers["content-disposition"]


def branch(
    folder: Folder, handle: str, of: str, at: int, differences: int | None = None, **values: Any
) -> str:
    """A branch; it is a copy without `differences`."""
    origin = {"episode": of, "at": at, "differences": differences or 0, "exact": differences is None}
    return folder.add(handle * (48 // len(handle)), branch=origin, verdict={"branch": origin}, **values)


async def test_an_episode_shows_the_tree_that_it_is_in(state: Path) -> None:
    with Folder(state) as folder:
        root = folder.add("1" * 48, labels={"run": "r"}, reward=0.0)
        b = branch(folder, "2", root, 3, labels={"run": "r", "heat": "57"}, reward=0.5)
        c = branch(folder, "3", root, 3, labels={"run": "r"}, reward=1.0, started_at=NOW + 1)
        d = branch(folder, "4", root, 12, 2, reward=LIVE)
        e = branch(folder, "5", b, 7, 1, labels={"run": "r", "heat": "57"}, reward=None)
        f = branch(folder, "6", e, 7, 0)
        g = branch(folder, "7", root, 0, 0)
        h = branch(folder, "a", root, 3, labels={"run": "r"}, reward=0.25)
        folder.add("8" * 48, labels={"replay_of": root})
        alone = folder.add("9" * 48)
    names = {root: "A", b: "B", c: "C", d: "D", e: "E", f: "F", g: "G", h: "H"}
    expected = [
        "✗ 0.00 A",
        "before the first call",
        "  ✓ 1.00 G",
        "after call 3 · 3 branches",
        "  ✗ 0.50 B copy heat=57",
        "  after call 7",
        "    ∅ lost E replayed 1 differs",
        "    after call 7",
        "      ✓ 1.00 F replayed",
        "  ✓ 1.00 C copy",
        "  ✗ 0.25 H copy",
        "after call 12",
        "  ● ready D replayed 2 differ",
    ]
    async with signed_in(state) as client:
        for present, name in names.items():
            page = await text_of(client, f"/e/{present}")
            marked = [line.replace(f" {name}", f" {name} this episode") for line in expected]
            assert outline(page, names) == marked
            assert all(f'href="/e/{other}"' in page for other in names)
            assert re.findall(r'href="/e/(\w+)" aria-current="page"', page) == [present]
            assert "8 episodes, best reward 1.00" in words(page)
            assert "✓ 3 succeeded ✗ 3 failed ∅ 1 lost ● 1 live" in words(page)
        assert outline(await text_of(client, f"/e/{alone}"), {}) == []


async def test_a_deep_tree_has_the_nearest_origins(state: Path) -> None:
    with Folder(state) as folder:
        chain = [folder.add("f" * 48)]
        for number in range(60):
            origin = {"episode": chain[-1], "at": number}
            chain.append(folder.add(f"{number:048x}", branch=origin, entries=[]))
    async with signed_in(state) as client:
        for present, first, last in ((0, 0, 32), (40, 24, 56), (60, 44, 60)):
            page = await text_of(client, f"/e/{chain[present]}")
            lines = outline(page, {})
            origins = [chain[first - 1]] if first else []
            assert re.findall(r"[0-9a-f]{16}", "\n".join(lines)) == [*origins, *chain[first : last + 1]]
            assert ("and 1 more" in lines[-1]) == (last < 60)
            assert f"{last - first + 1} episodes are drawn" in words(page)


async def test_several_runs_are_compared_side_by_side(state: Path) -> None:
    rewards = {"alpha": (0.0, 1.0), "beta": (1.0, 1.0), "g&mma": (1.0, 0.0)}
    with Folder(state) as folder:
        ids = {
            (run, task): folder.add(
                f"{number}{task}" * 24, labels={"run": run}, reward=reward, task=f"task-{task}"
            )
            for number, (run, both) in enumerate(rewards.items())
            for task, reward in enumerate(both)
        }
        for number in range(7):
            folder.add(f"{number}f" * 24, labels={"run": f"more-{number}"})
    async with signed_in(state) as client:
        runs = await text_of(client, "/runs")
        assert '<input type="checkbox" name="run" value="g&amp;mma"' in runs
        page = await text_of(client, "/compare?run=alpha&run=beta&run=g%26mma&run=&run=beta")
        assert re.findall(r'<input name="run" value="([^"]*)"', page) == ["alpha", "beta", "g&amp;mma", ""]
        assert "B − A: +50 ± 50 points over 2 tasks" in words(page)
        assert "C − A: 0 ± 100 points over 2 tasks" in words(page)
        # Of the runs that differ most in a task.
        assert f"a={ids['alpha', 0]}&amp;b={ids['beta', 0]}" in page
        assert f"a={ids['alpha', 1]}&amp;b={ids['g&mma', 1]}" in page
        assert 'href="/compare?run=alpha&amp;run=beta&amp;run=g%26mma&amp;sort=-C">C success</a>' in page
        page = await text_of(client, "/compare?run=alpha&run=beta&run=g%26mma&sort=-C")
        assert page.index('"row">task-0') < page.index('"row">task-1')
        page = await text_of(client, "/compare?run=alpha&run=beta&run=g%26mma&sort=C")
        assert page.index('"row">task-1') < page.index('"row">task-0')
        many = "&".join(f"run=more-{number}" for number in range(7))
        assert "H success" in await text_of(client, f"/compare?run=alpha&{many}")
        assert "At most 8 runs" in await text_of(client, f"/compare?run=alpha&run=beta&{many}", 400)
        assert "one more" not in await text_of(client, "/compare?run=alpha")


async def test_a_call_of_a_long_episode_has_an_address(state: Path) -> None:
    with Folder(state) as folder:
        name = folder.add("1" * 48, entries=[Call(reply=f"reply {number}") for number in range(1, 1001)])
    async with signed_in(state) as client:
        page = await text_of(client, f"/e/{name}?call=732")
        assert re.findall(r'<article[^>]* id="c(\d+)"', page) == [str(number) for number in range(701, 801)]
        assert len(re.findall(r'class="box closed"', page)) == 9
        box = await text_of(client, f"/e/{name}/calls?first=801&last=900")
        assert re.findall(r'<article[^>]* id="c(\d+)"', box) == [str(number) for number in range(801, 901)]
        assert "<html" not in box
        # More than a box is not given, whatever is asked for.
        assert (await text_of(client, f"/e/{name}/calls?first=1&last=1000")).count("<article") == 100


async def test_search_and_the_next_error_lead_to_a_call(state: Path) -> None:
    entries = [Call(reply=f"reply {number}", failed=number in (40, 170)) for number in range(1, 301)]
    with Folder(state) as folder:
        name = folder.add("1" * 48, entries=entries)
    async with signed_in(state) as client:

        async def found(query: str) -> str:
            response = await client.get(f"/e/{name}/find?{query}")
            assert response.status_code == 303
            return response.headers["location"]

        assert await found("q=REPLY+222") == f"/e/{name}?call=222&q=REPLY%20222#c222"
        assert await found("failed=1") == f"/e/{name}?call=40#c40"
        assert await found("failed=1&after=40") == f"/e/{name}?call=170#c170"
        # After the last one, from the beginning.
        assert await found("failed=1&after=170") == f"/e/{name}?call=40#c40"
        nothing = await found("q=nowhere&after=7")
        assert nothing == f"/e/{name}?call=7&q=nowhere&found=nothing#calls"
        assert "Nothing found" in await text_of(client, nothing.partition("#")[0])


async def test_a_run_is_searched_through_all_its_episodes(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder(state) as folder:
        names = [
            folder.add(
                f"{number:048x}",
                task=f"task-{number}",
                labels={"run": "a/b"},
                reward=float(number % 2),
                started_at=NOW + number,
                entries=[Call(), Call(reply=f"before <the> Needle{number} behind it")],
            )
            for number in range(45)
        ]
        folder.add("f" * 48, labels={"run": "other"}, entries=[Call(reply="needle")])
    async with signed_in(state) as client:
        assert 'placeholder="Search the calls of all episodes"' in await text_of(client, "/runs/a%2Fb")
        page = await text_of(client, "/runs?name=a/b&q=needle41")
        assert re.findall(r'href="(/e/[^"]*)">2 files__read_file', page) == [
            f"/e/{names[41]}?call=2&amp;q=needle41#c2"
        ]
        assert "before &lt;the&gt; <mark>Needle41</mark> behind it" in page
        assert "45 episodes searched" in page
        assert "Search on" not in page
        assert "Nothing found." in await text_of(client, "/runs?name=a/b&q=haystack")
        # When time is up, a link leads on; each episode is found once.
        monkeypatch.setattr(runs, "SEARCH_SECONDS", -1)
        found: list[str] = []
        path = "/runs?name=a/b&q=needle"
        while path:
            page = await text_of(client, path)
            found += re.findall(r'href="/e/([0-9a-f]{16})"', page)
            on = re.search(r'href="([^"]*cursor=[^"]*)">Search on', page)
            path = unescape(on[1]) if on else ""
        assert sorted(found) == sorted(names)
        assert found[0] == names[44]


async def test_a_long_reply_is_folded_and_can_be_had_whole(state: Path) -> None:
    long, huge = "x" * 1999 + "END" + "y" * 3000, "z" * 200_000
    with Folder(state) as folder:
        name = folder.add("1" * 48, entries=[Call(reply=long), Call(reply=huge)])
    async with signed_in(state) as client:
        page = await text_of(client, f"/e/{name}")
        assert "END" not in page
        assert len(page) < 40_000
        whole = await text_of(client, f"/e/{name}/calls?first=1&last=1&whole=1")
        assert "END" in whole
        raw = await client.get(f"/e/{name}/reply/2")
        assert huge in raw.text
        assert raw.headers["content-type"] == "text/plain; charset=utf-8"
        assert raw.headers["content-security-policy"].startswith("sandbox")
        assert (await client.get(f"/e/{name}/reply/3")).status_code == 404
        assert (await client.get(f"/e/{name}/reply/0")).status_code == 404


async def test_a_long_note_is_folded_and_can_be_opened(state: Path) -> None:
    text = "<b>I think</b>\n" * 1_000
    with Folder(state) as folder:
        name = folder.add("1" * 48, entries=[Note("short"), Call(), Note(text)])
    async with signed_in(state) as client:
        html = await text_of(client, f"/e/{name}")
        assert html.count("I think") < 200
        assert f'href="/e/{name}/note/2">12.7 KiB more</a>' in html
        whole = await client.get(f"/e/{name}/note/2")
        assert whole.text == text
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        assert whole.headers["content-security-policy"].startswith("sandbox")
        for number in (0, 3):
            assert (await client.get(f"/e/{name}/note/{number}")).status_code == 404


async def test_tokens_and_cost_are_summed_over_the_notes(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usages = [{"input_tokens": 1_200, "cost_usd": 0.25}, {}, {"input_tokens": 34, "cost_usd": 0.5, "x": True}]
    with Folder(state) as folder:
        name = folder.add("1" * 48, entries=[Call(), *(Note("text", usage=usage) for usage in usages)])
    async with signed_in(state) as client:
        page = words(await text_of(client, f"/e/{name}"))
        assert "input tokens 1 234 " in page
        assert "cost usd 0.75 " in page
        assert "· cost usd 0.25" in page
    assert show_episode(state, name, as_json=True, handles=False) == 0
    assert json.loads(capsys.readouterr().out)["usage"] == {"input_tokens": 1_234, "cost_usd": 0.75}


async def test_a_live_episode_and_one_without_files_are_shown(state: Path) -> None:
    with Folder(state) as folder:
        live = folder.add("1" * 48, reward=LIVE)
        gone = folder.add("2" * 48)
    (state / "episodes" / ("2" * 48) / "trajectory.jsonl").unlink()
    async with signed_in(state) as client:
        assert "playing" in words(await text_of(client, f"/e/{live}"))
        assert "1.00" in words(await text_of(client, f"/e/{gone}"))
        await text_of(client, f"/e/{public_id('unknown')}", 404)
        await text_of(client, "/e/..%2f..%2fkey", 404)


async def test_episodes_are_filtered_and_paged(state: Path) -> None:
    with Folder(state) as folder:
        for number in range(120):
            folder.add(
                f"{number:048x}",
                task="t",
                labels={"model": "m"},
                reward=float(number % 2),
                started_at=NOW + number,
                entries=[],
            )
        folder.add("f" * 48, task="other", entries=[])
    async with signed_in(state) as client:
        page = await text_of(client, "/episodes?task=t&label=model%3Dm")
        assert page.count('<th scope="row">') == 100
        more = re.search(r'href="(/episodes\?[^"]*cursor=[^"]*)"', page)
        assert more is not None
        rest = await text_of(client, more[1].replace("&amp;", "&"))
        assert rest.count('<th scope="row">') == 20
        assert (await text_of(client, "/episodes?show=failed&task=t")).count("✓") == 0
        assert "No episode fits" in await text_of(client, "/episodes?task=none")
        await text_of(client, "/episodes?cursor=nonsense", 400)


async def test_the_curves_of_runs_with_steps_are_over_each_other_on_the_page_to_compare(state: Path) -> None:
    with Folder(state) as folder:
        for letter, run in enumerate(("alpha", "beta")):
            for step in range(3):
                labels = {"run": run, "step": f"{step}"}
                folder.add(f"{letter}{step}" * 24, labels=labels, reward=step / 2)
        folder.add("9f" * 24, labels={"run": "without"})
    async with signed_in(state) as client:
        page = await text_of(client, "/compare?run=alpha&run=beta")
        assert page.count('<polyline class="run-line run-') == 2
        assert "step 2: B: reward 1" in page
        assert "run-line" not in await text_of(client, "/compare?run=alpha&run=without")


async def test_the_rewards_along_an_attempt_are_a_line_over_its_calls(state: Path) -> None:
    with Folder(state) as folder:
        whole = folder.add("a1" * 24, labels={"run": "alpha"}, reward=1.0)
        for at, reward in enumerate((0.0, 0.25, 1.0)):
            origin = {"episode": whole, "at": at, "differences": 0}
            folder.add(f"{at}b" * 24, labels={"run": "alpha", "along": f"{at}"}, reward=reward, branch=origin)
    async with signed_in(state) as client:
        page = await text_of(client, f"/e/{whole}")
        assert "after call 1: reward 0.25" in page
        assert "Reward, had it ended after the call" in page
        assert "Reward, had it ended" not in await text_of(client, f"/e/{public_id('0b' * 24)}")
