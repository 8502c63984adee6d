// A button on every block of code that copies it; and a flag is not torn apart at its hyphens.
document.addEventListener("DOMContentLoaded", () => {
  for (const word of document.querySelectorAll("code.literal")) {
    if (/^\S{1,30}$/.test(word.textContent)) word.style.whiteSpace = "nowrap";
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
