"use strict";
// Reads values under the pointer (or the arrow keys) off all charts at once; a click goes to the step's row.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const areas = [...document.querySelectorAll(".chart .area")];
const crosses = areas.map((area) => {
  const cross = area.appendChild(document.createElement("i"));
  cross.className = "cross";
  cross.hidden = true;
  return cross;
});
let current = 0;

function shown(value) {
  if (value === null) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function row(label, value) {
  const line = document.createElement("div");
  const name = line.appendChild(document.createElement("span"));
  name.textContent = label;
  line.append(shown(value));
  return line;
}

function show(area, index, x, y) {
  current = Math.max(0, Math.min(data.bins.length - 1, index));
  for (const cross of crosses) {
    cross.style.left = (100 * (current + 0.5)) / data.bins.length + "%";
    cross.hidden = false;
  }
  const first = data.bins[current];
  const head = document.createElement("b");
  head.textContent = data.width > 1 ? `steps ${first}–${first + data.width - 1}` : `step ${first}`;
  const series = data.charts[area.closest(".chart").dataset.chart];
  tip.replaceChildren(head, ...Object.entries(series).map(([label, values]) => row(label, values[current])));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 4)) + "px";
}

function hide() {
  tip.hidden = true;
  for (const cross of crosses) cross.hidden = true;
}

function goTo() {
  const steps = document.getElementById("all-steps");
  if (!steps) return;
  steps.open = true;
  location.hash = `s${data.bins[current]}`;
}

for (const area of areas) {
  const plot = area.closest(".plot");
  const middle = () => {
    const box = area.getBoundingClientRect();
    return [box.left + (box.width * (current + 0.5)) / data.bins.length, box.top + 20];
  };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show(area, Math.floor(((event.clientX - box.left) / box.width) * data.bins.length), event.clientX, event.clientY);
  });
  area.addEventListener("pointerleave", hide);
  area.addEventListener("click", goTo);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: data.bins.length - 1 };
    if (event.key === "Escape") hide();
    else if (event.key === "Enter") goTo();
    else if (event.key in moves) {
      event.preventDefault();
      current = Math.max(0, Math.min(data.bins.length - 1, moves[event.key]));
      show(area, current, ...middle());
    }
  });
}
