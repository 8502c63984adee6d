// The address that `serve` prints has the key behind `#`, which browsers never send to a server.

/** Present the key in the address, and remove it from the address. */
export function enterByFragment() {
  const match = /^#key=([\w-]+)$/.exec(location.hash);
  if (!match) return;
  history.replaceState(null, "", location.pathname + location.search);
  const form = document.getElementById("enter");
  const field = document.getElementById("secret");
  if (form instanceof HTMLFormElement && field instanceof HTMLInputElement) {
    field.value = match[1] ?? "";
    form.submit();
  }
}
