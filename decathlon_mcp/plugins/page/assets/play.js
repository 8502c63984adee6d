// An attempt without reloads: replies appear when they are there, and Ctrl+Enter calls.

const PAUSE = 1000;
const IDLE_PAUSE = 60_000;

export function showPlay() {
  const play = document.getElementById("play");
  if (!play || play.dataset.phase === "over") return;
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!(form instanceof HTMLFormElement) || form.id !== "call" || !event.submitter) return;
    event.preventDefault();
    void send(form, event.submitter);
  });
  document.addEventListener("keydown", (event) => {
    const button = document.querySelector("#call button.primary");
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !(button instanceof HTMLButtonElement)) return;
    event.preventDefault();
    button.form?.requestSubmit(button);
  });
  void follow(play);
}

/** Send the form as the browser would, and show what it answers. @param {HTMLFormElement} form @param {HTMLElement} button */
async function send(form, button) {
  const focused = document.activeElement?.id;
  const body = new URLSearchParams();
  for (const [name, value] of new FormData(form, button)) body.append(name, String(value));
  form.setAttribute("aria-busy", "true");
  const response = await fetch(form.action, { method: "POST", body }).catch(() => null);
  form.removeAttribute("aria-busy");
  if (!response?.ok) {
    // The browser shows what is wrong; sent again, the form calls once all the same.
    const action = document.createElement("input");
    Object.assign(action, { type: "hidden", name: "do", value: button.getAttribute("value") });
    form.append(action);
    return form.submit();
  }
  history.replaceState(null, "", response.url);
  show(await response.text(), true);
  document.getElementById(focused ?? "")?.focus();
}

/** Renew the lease as long as the page is open, and show what has changed. @param {HTMLElement} play */
async function follow(play) {
  let before = "";
  for (;;) {
    const response = await fetch(play.dataset.alive ?? "", { method: "POST" }).catch(() => null);
    const state = response?.ok ? await response.text() : before;
    if (state !== before || play.dataset.waiting) await refresh(state.split(" ")[0] ?? "");
    before = state;
    const busy = state.trim().includes(" ") || play.dataset.waiting;
    await new Promise((done) => setTimeout(done, busy && !document.hidden ? PAUSE / 4 : busy ? PAUSE : IDLE_PAUSE));
  }
}

/** @param {string} phase */
async function refresh(phase) {
  const play = document.getElementById("play");
  // Another phase has another page.
  if (phase && phase !== play?.dataset.phase) return location.reload();
  const response = await fetch(location.href).catch(() => null);
  if (response?.ok) show(await response.text(), false);
}

/** Put the parts of a newer page into this one; the form only if it was sent. @param {string} html @param {boolean} withForm */
function show(html, withForm) {
  const page = new DOMParser().parseFromString(html, "text/html");
  if (page.getElementById("play")?.dataset.phase !== document.getElementById("play")?.dataset.phase) return location.reload();
  for (const id of withForm ? ["form-part", "running-part", "calls-part"] : ["running-part", "calls-part"]) {
    const [old, fresh] = [document.getElementById(id), page.getElementById(id)];
    if (old && fresh && old.innerHTML !== fresh.innerHTML) old.replaceWith(fresh);
  }
}
