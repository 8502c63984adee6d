// The rows of live episodes. Nothing moves while one reads: rows keep their places, and new ones wait to be asked for.

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
  fresh.addEventListener("click", () => {
    if (newest) replace(section, rows, newest);
    if (newest) update(section, rows, fresh, newest);
    rows.querySelector("a")?.focus();
  });
  setInterval(() => refreshAges(rows), 1000);
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

/** @param {HTMLElement} section @param {HTMLElement} rows @param {Snapshot} snapshot */
function replace(section, rows, snapshot) {
  document.getElementById("nothing")?.remove();
  rows.replaceChildren(...snapshot.episodes.map((row) => {
    const element = document.createElement("tr");
    element.dataset.id = row.id;
    const chip = document.createElement("span");
    chip.className = "chip";
    element.insertCell().append(chip);
    const head = document.createElement("th");
    head.scope = "row";
    const link = document.createElement("a");
    link.href = (section.dataset.episodes ?? "") + row.id;
    link.textContent = row.task;
    head.append(link);
    element.append(head);
    for (const text of [row.run ?? "–", row.model ?? "–", "", "", ""]) element.insertCell().textContent = text;
    const [, , , , calls, age] = element.cells;
    calls?.classList.add("n");
    age?.classList.add("n");
    if (age) age.dataset.since = String(row.started_at);
    return element;
  }));
  refreshAges(rows);
}

/** @param {HTMLElement} rows */
function refreshAges(rows) {
  for (const cell of rows.querySelectorAll("[data-since]")) {
    const seconds = Math.max(0, Math.floor(Date.now() / 1000 - Number(cell.getAttribute("data-since"))));
    const [minutes, hours] = [Math.floor(seconds / 60), Math.floor(seconds / 3600)];
    const days = Math.floor(hours / 24);
    setText(cell, days ? `${days} d ${hours % 24} h` : hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`);
  }
}

/** Change a text only if it differs, so that nothing that is selected is lost. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
