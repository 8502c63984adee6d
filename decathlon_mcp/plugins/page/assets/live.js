// The rows of live episodes. Nothing moves while one reads: rows keep their places, and new ones wait to be asked for.
import { fetchPage } from "./boxes.js";
import { follow } from "./stream.js";

/** @typedef {import("./stream.js").Row} Row */
/** @typedef {import("./stream.js").Snapshot} Snapshot */

export function showLive() {
  const section = document.getElementById("live");
  const rows = document.querySelector("#rows tbody");
  const fresh = document.getElementById("fresh");
  const status = document.getElementById("stream");
  if (!section || !(rows instanceof HTMLElement) || !fresh || !status) return;
  /** @type {Snapshot | null} */
  let newest = null;
  follow(section.dataset.live ?? "", status, (snapshot) => {
    newest = snapshot;
    update(section, rows, fresh, newest);
  });
  fresh.addEventListener("click", async () => {
    const newer = (await fetchPage(location.href))?.querySelector("#rows tbody");
    if (!newer) return;
    document.getElementById("nothing")?.remove();
    rows.replaceChildren(...newer.children);
    if (newest) update(section, rows, fresh, newest);
    rows.querySelector("a")?.focus();
  });
}

/** @param {HTMLElement} section @param {HTMLElement} rows @param {HTMLElement} fresh @param {Snapshot} snapshot */
function update(section, rows, fresh, snapshot) {
  for (const name of /** @type {const} */ (["state", "queued", "sandboxes", "places", "live"])) {
    const element = section.querySelector(`[data-count=${name}]`);
    if (element) setText(element, String(snapshot[name]));
  }
  const byId = new Map(snapshot.episodes.map((row) => [row.id, row]));
  for (const element of rows.querySelectorAll("tr")) {
    const row = byId.get(element.dataset.id ?? "");
    byId.delete(element.dataset.id ?? "");
    fill(element, row);
  }
  fresh.classList.toggle("away", byId.size === 0);
  setText(fresh, `Show ${byId.size} new`);
}

/** Cells of one row; an episode that is over keeps its place. @param {HTMLTableRowElement} element @param {Row | undefined} row */
function fill(element, row) {
  const [phase, , , , calls, age, waits] = element.cells;
  if (!phase || !calls || !age || !waits) return;
  const chip = phase.querySelector(".chip");
  const kind = !row ? "over" : row.phase === "queued" ? "queued" : "live";
  if (chip && chip.getAttribute("data-phase") !== (row?.phase ?? "ended")) {
    chip.setAttribute("data-phase", row?.phase ?? "ended");
    chip.className = `chip ${kind}`;
    chip.textContent = `${{ over: "○", queued: "◌", live: "●" }[kind]} ${row?.phase ?? "ended"}`;
  }
  if (row) {
    setText(calls, String(row.calls));
    setText(waits, row.waits ?? "");
  } else {
    delete age.dataset.since;
    setText(waits, "");
  }
}

/** Change a text only if it differs, so that nothing that is selected is lost. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
