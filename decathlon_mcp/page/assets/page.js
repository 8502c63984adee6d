// What the browser adds to every page: each page works without it.
import { showBoxes } from "./boxes.js";
import { enterByFragment } from "./enter.js";
import { showLive } from "./live.js";
import { showPlay } from "./play.js";
import { watchEpisode } from "./watch.js";

/** Show the times of the page relative to now. */
function refreshTimes() {
  const now = Date.now() / 1000;
  for (const element of document.querySelectorAll("time[data-time]")) {
    const text = ago(now - Number(element.getAttribute("data-time")));
    if (element.textContent !== text) element.textContent = text;
  }
}

/** @param {number} seconds */
function ago(seconds) {
  if (seconds < 5) return "just now";
  for (const [length, unit] of /** @type {const} */ ([[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]])) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  }
  return "just now";
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
setInterval(refreshTimes, 10_000);
