// Adds a copy button to every code block, and keeps flags such as --max-calls from breaking at a hyphen.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("code.literal")) {
    if (/^\S{1,30}$/.test(code.textContent)) code.style.whiteSpace = "nowrap";
  }
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.querySelector("pre").textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(block.querySelector("pre"));
        button.textContent = "selected";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
