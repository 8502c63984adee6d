// An episode of 10,000 calls: boxes of 100, whose calls are there while they are near the part that one sees.

const CALL_HEIGHT = 150;
const MARGIN = 2000;

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!(entry.target instanceof HTMLElement)) continue;
      if (entry.isIntersecting) void fill(entry.target);
      else empty(entry.target);
    }
  },
  { rootMargin: `${MARGIN}px 0px` },
);

export function showBoxes() {
  const boxes = document.querySelectorAll(".box");
  if (document.querySelector(".call, .box")) addUnfolding();
  if (boxes.length < 2) return;
  for (const box of boxes) {
    // A guess until the box was seen; from then on its own height.
    if (box instanceof HTMLElement && box.dataset.calls) box.style.height = `${CALL_HEIGHT * Number(box.dataset.calls)}px`;
  }
  document.querySelector(".call.wanted")?.scrollIntoView({ behavior: "instant" });
  for (const box of boxes) observer.observe(box);
}

/** A further box, which is loaded when it is near. @param {Element} after @param {string} address @param {number} first @param {number} calls */
export function addBox(after, address, first, calls) {
  const box = Object.assign(document.createElement("div"), { className: "box closed", id: `b${first}` });
  box.dataset.box = address;
  box.style.height = `${CALL_HEIGHT * calls}px`;
  after.before(box);
  observer.observe(box);
  return box;
}

/** Load the calls of a box, unless they are there. @param {HTMLElement} box */
export async function fill(box) {
  if (!box.classList.contains("closed")) return;
  box.classList.remove("closed");
  const nodes = await fetchNodes(box.dataset.box ?? "");
  if (!nodes || box.classList.contains("closed")) return box.classList.add("closed");
  const before = box.getBoundingClientRect();
  box.style.height = "";
  // Notes behind the last call stand before the next one as soon as there is one.
  for (const node of nodes) if (node instanceof HTMLElement && !box.contains(document.getElementById(node.id))) document.getElementById(node.id)?.remove();
  box.replaceChildren(...nodes);
  // What one sees stays where it is, whatever the height of a box above.
  if (before.bottom < innerHeight / 2) scrollBy({ top: box.offsetHeight - before.height, behavior: "instant" });
}

/** @param {HTMLElement} box */
function empty(box) {
  if (box.classList.contains("closed") || box.contains(document.activeElement)) return;
  box.style.height = `${box.offsetHeight}px`;
  box.classList.add("closed");
  box.replaceChildren(Object.assign(document.createElement("a"), { href: `#${box.id}`, textContent: "…" }));
}

/** The page at an address, without running anything of it. @param {string} address */
export async function fetchPage(address) {
  const response = await fetch(address, { headers: { Accept: "text/html" } }).catch(() => null);
  return response?.ok ? new DOMParser().parseFromString(await response.text(), "text/html") : null;
}

/** What a fragment of HTML has. @param {string} address */
export async function fetchNodes(address) {
  return (await fetchPage(address))?.body.childNodes;
}

/** "… more" shows the rest in place. */
function addUnfolding() {
  document.addEventListener("click", async (event) => {
    const link = event.target instanceof Element ? event.target.closest("a[data-unfold]") : null;
    const call = link?.closest(".call");
    if (!(link instanceof HTMLAnchorElement) || !call || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const nodes = await fetchNodes(link.dataset.unfold ?? "");
    const whole = nodes && [...nodes].find((node) => node instanceof HTMLElement);
    if (whole instanceof HTMLElement) {
      call.replaceWith(whole);
      whole.querySelector("a")?.focus();
    }
  });
}
