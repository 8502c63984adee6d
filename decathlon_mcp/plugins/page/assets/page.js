// What the browser adds to every page: each page works without it.
import { showBoxes } from "./boxes.js";
import { enterByFragment } from "./enter.js";
import { setText, showLive } from "./live.js";
import { showPlay } from "./play.js";
import { watchEpisode } from "./watch.js";

/** Show times relative to now: how long ago it was, or for how long it lasts. */
function refreshTimes() {
  const now = Date.now() / 1000;
  for (const element of document.querySelectorAll("[data-time]")) {
    const seconds = now - Number(element.getAttribute("data-time"));
    setText(element, seconds < 5 ? "just now" : `${duration(seconds, 1)} ago`);
  }
  for (const element of document.querySelectorAll("[data-since]")) setText(element, duration(now - Number(element.getAttribute("data-since")), 2));
}

/** A duration in its one or two largest units. @param {number} seconds @param {number} parts */
function duration(seconds, parts) {
  const all = Math.max(0, Math.floor(seconds));
  const counts = [all / 86400, (all / 3600) % 24, (all / 60) % 60, all % 60].map(Math.floor);
  const first = Math.max(0, counts.findIndex((count, index) => count || index === 3));
  const text = (/** @type {number} */ index) => `${counts[index]} ${["d", "h", "min", "s"][index]}`;
  return parts > 1 && counts[first + 1] ? `${text(first)} ${text(first + 1)}` : text(first);
}

/** Buttons that copy what stands beside them. */
function addCopying() {
  for (const button of document.querySelectorAll("button.copy")) {
    if (!navigator.clipboard || !(button instanceof HTMLButtonElement)) return;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.dataset.copy ?? "");
      const label = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }
}

enterByFragment();
addCopying();
showLive();
showBoxes();
showPlay();
watchEpisode();
setInterval(refreshTimes, 1000);
