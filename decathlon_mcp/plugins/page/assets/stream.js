// Server-sent events of what plays now, while somebody looks at the tab.

/** @typedef {{id: string, phase: string, calls: number, replies: number, waits: string | null}} Row */
/** @typedef {{state: string, queued: number, sandboxes: number, places: number, live: number, episodes: Row[]}} Snapshot */

/**
 * Follow an address until the function that this returns is called; `status` says how it is.
 * @param {string} address @param {Element} status @param {(snapshot: Snapshot) => void} show
 */
export function follow(address, status, show) {
  /** @type {EventSource | null} */
  let stream = null;
  /** @param {string} text @param {boolean} broken */
  const say = (text, broken) => {
    status.textContent = text;
    status.classList.toggle("broken", broken);
  };
  const open = () => {
    stream = new EventSource(address);
    stream.onopen = () => say("live", false);
    stream.onmessage = (event) => show(JSON.parse(event.data));
    stream.onerror = () => {
      const closed = stream?.readyState === EventSource.CLOSED;
      say(closed ? "no live view: reload this page" : "connection lost, trying again", true);
    };
  };
  const close = () => {
    stream?.close();
    stream = null;
    say("paused", false);
  };
  // A browser opens six connections to one host; a tab that nobody sees must not hold one.
  const change = () => (document.hidden ? close() : stream ?? open());
  document.addEventListener("visibilitychange", change);
  if (!document.hidden) open();
  return () => {
    document.removeEventListener("visibilitychange", change);
    close();
    say("", false);
  };
}
