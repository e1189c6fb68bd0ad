"use strict";
// Steps through the rounds of an answer. Without this they are a list, the first of them open.
let latest = null; // the explorer that the arrow keys turn
for (const explorer of document.querySelectorAll(".explorer")) {
  const rounds = [...explorer.querySelectorAll(".round")];
  const bar = explorer.querySelector(".bar");
  const [earlier, later] = bar.querySelectorAll("button");
  const slider = bar.querySelector("input");
  const text = explorer.parentElement;
  const runs = [...text.querySelectorAll("[data-round]")].filter((run) => run.dataset.round < rounds.length);
  let now = 0;
  const show = (next) => {
    now = Math.max(0, Math.min(rounds.length - 1, next));
    rounds.forEach((round, place) => {
      round.hidden = place !== now;
      round.open = place === now;
    });
    runs.forEach((run) => run.classList.toggle("now", explorer.open && Number(run.dataset.round) === now));
    slider.value = now + 1;
    earlier.disabled = now === 0;
    later.disabled = now === rounds.length - 1;
  };
  const turn = (next) => {
    show(next);
    latest = { explorer, step: (way) => show(now + way) };
  };
  earlier.addEventListener("click", () => turn(now - 1));
  later.addEventListener("click", () => turn(now + 1));
  slider.addEventListener("input", () => turn(slider.value - 1));
  explorer.addEventListener("toggle", () => turn(now));
  for (const run of runs) {
    run.addEventListener("click", () => {
      explorer.open = true;
      turn(Number(run.dataset.round));
    });
  }
  bar.hidden = false;
  text.classList.add("tappable");
  show(0);
}
document.addEventListener("keydown", (event) => {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!way || !latest || !latest.explorer.open || event.target.matches("input")) return;
  latest.step(way);
  event.preventDefault();
});
