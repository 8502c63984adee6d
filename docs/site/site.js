// Adds a copy button next to every code block, keeps flags such as --max-calls from breaking at a hyphen, and
// makes what may scroll reachable by keyboard.
const COPY = '<svg viewBox="0 0 20 20"><rect x="7" y="7" width="10" height="10" rx="2"/><path d="M4 13H3V3h10v1"/></svg>';
const DONE = '<svg viewBox="0 0 20 20"><path d="M4 10.5l4 4 8-9"/></svg>';

function setState(button, icon, label) {
  button.innerHTML = icon;
  button.classList.toggle("done", icon === DONE);
  button.ariaLabel = button.title = label;
}

document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("code.literal")) {
    if (/^\S{1,30}$/.test(code.textContent)) code.style.whiteSpace = "nowrap";
  }
  for (const image of document.querySelectorAll("article p > img:only-child")) {
    image.parentElement.classList.add("scroll");
  }
  for (const part of document.querySelectorAll(".table-wrapper, .scroll, div.highlight pre")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  }
  for (const block of document.querySelectorAll("div.highlight")) {
    const pre = block.querySelector("pre");
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    setState(button, COPY, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(pre.textContent);
        setState(button, DONE, "Copied");
      } catch {
        getSelection().selectAllChildren(pre);
        setState(button, DONE, "Selected");
      }
      setTimeout(() => setState(button, COPY, "Copy"), 1500);
    });
    block.append(button);
  }
});
