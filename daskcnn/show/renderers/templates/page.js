"use strict";
// A click on a worker, in a table, a lane or the list, shows that worker alone; a second one shows all again.
(() => {
  const said = document.getElementById("said");
  let chosen = "";

  const show = (worker) => {
    chosen = worker;
    for (const each of document.querySelectorAll("[data-worker]")) {
      each.hidden = chosen !== "" && each.dataset.worker !== chosen;
    }
    for (const button of document.querySelectorAll("[data-pick]")) {
      button.setAttribute("aria-pressed", String(button.dataset.pick === chosen));
    }
    if (said) said.textContent = chosen === "" ? "" : `Only ${chosen} is shown.`;
  };

  document.addEventListener("click", (event) => {
    const found = event.target.closest("[data-pick], [data-worker]");
    if (!found || (!found.matches("button") && !getSelection().isCollapsed)) return; // text was marked, not clicked
    const worker = found.dataset.pick ?? found.dataset.worker;
    show(worker === chosen ? "" : worker);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show("");
  });
  document.documentElement.classList.add("live");
})();
