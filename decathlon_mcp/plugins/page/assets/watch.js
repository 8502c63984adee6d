// The page of a live episode: its new calls wait at the end of the page to be asked for.
import { addBox, fetchNodes, fill } from "./boxes.js";
import { setText } from "./live.js";
import { follow } from "./stream.js";

const BOX_CALLS = 100;
const MAX_REFRESHED = 20;

export function watchEpisode() {
  const playing = document.getElementById("playing");
  const fresh = document.getElementById("fresh");
  const status = document.getElementById("stream");
  if (!playing || !(fresh instanceof HTMLButtonElement) || !fresh.parentElement || !status) return;
  const { path = "", live = "", calls = "0" } = playing.dataset;
  const end = fresh.parentElement;
  let shown = Number(calls);
  let newest = shown;

  const stop = follow(live, status, ({ episodes: [row] }) => {
    if (!row) {
      const link = playing.querySelector("a");
      setText(playing.querySelector(".chip") ?? status, "○ ended");
      if (link) [link.href, link.textContent] = [path, "Show how it ended"];
      return stop();
    }
    newest = Math.max(newest, row.calls);
    const count = document.querySelector("[data-count=calls]");
    if (count) setText(count, String(newest));
    // Of those calls that have no reply on this page, some have one by now.
    const answered = pending().length > row.calls - row.replies;
    if (newest > shown) setText(fresh, newest - shown > 1 ? `Show ${newest - shown} new calls` : "Show 1 new call");
    else if (answered) setText(fresh, "Show new replies");
    fresh.classList.toggle("away", newest === shown && !answered);
  });

  fresh.addEventListener("click", async () => {
    fresh.disabled = true;
    await Promise.all(pending().slice(-MAX_REFRESHED).map((call) => refresh(call, path)));
    /** @type {HTMLElement | undefined} */
    let added;
    while (shown < newest) {
      const [first, last] = [shown + 1, Math.min(shown + BOX_CALLS, newest)];
      const box = addBox(end, `${path}/calls?first=${first}&last=${last}`, first, last - shown);
      added ??= box;
      shown = last;
    }
    document.getElementById("no-calls")?.remove();
    fresh.disabled = false;
    fresh.classList.add("away");
    if (!added) return;
    await fill(added);
    added.scrollIntoView({ block: "nearest", behavior: "instant" });
    added.querySelector("a")?.focus({ preventScroll: true });
  });
}

/** The calls on this page that have no reply. */
function pending() {
  return [...document.querySelectorAll(".call.pending")];
}

/** @param {Element} call @param {string} path */
async function refresh(call, path) {
  const nodes = await fetchNodes(`${path}/calls?first=${call.id.slice(1)}&last=${call.id.slice(1)}`);
  const newer = nodes && [...nodes].find((node) => node instanceof HTMLElement && node.id === call.id);
  if (newer) call.replaceWith(newer);
}
