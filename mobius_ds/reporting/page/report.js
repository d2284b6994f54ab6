"use strict";
// Draws every chart from the JSON beside it, in the colours of the page; moves all timelines together.

const charts = [...document.querySelectorAll(".chart")];
const timelines = charts.filter((chart) => "seconds" in chart.dataset);
const touch = matchMedia("(pointer: coarse)").matches;
const NARROW = 600, LEGEND_ENTRY = 15; // CSS pixels
const PRINTED_WIDTH = 700; // CSS pixels between the margins of an A4 page, and a little less

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function inks() {
  const ink = colour("--ink");
  return {
    "font.color": ink, "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.font.color": ink, "hoverlabel.bordercolor": ink,
  };
}

// A finger that drags over a chart means to scroll the page.
const dragmode = touch ? { dragmode: false } : {};
const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };

for (const chart of charts) {
  const { data, layout } = JSON.parse(document.querySelector(`script[data-chart="${chart.id}"]`).textContent);
  // Where legends are one column, they would take their height from the curves.
  const column = innerWidth < NARROW && layout.showlegend !== false;
  const entries = column ? data.filter((trace) => trace.showlegend !== false).length : 0;
  Plotly.newPlot(chart, data, { ...layout, ...dragmode, height: layout.height + LEGEND_ENTRY * entries }, config);
  Plotly.relayout(chart, inks());
}

const relayout = (layout) => charts.forEach((chart) => Plotly.relayout(chart, { ...inks(), ...layout }));
const printing = (now, layout) => {
  document.documentElement.classList.toggle("printing", now);
  relayout(layout);
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => relayout({}));
addEventListener("beforeprint", () => printing(true, { width: PRINTED_WIDTH }));
addEventListener("afterprint", () => printing(false, { width: null, autosize: true }));

if (timelines.length) {
  const whole = [...timelines[0].layout.xaxis.range], end = whole[1];
  let shown = whole;

  const show = (range) => {
    if (range[0] === shown[0] && range[1] === shown[1]) return; // what another timeline answers to being moved
    shown = range;
    timelines.forEach((chart) => Plotly.relayout(chart, { "xaxis.range": [...range] }));
  };

  timelines.forEach((chart) => chart.on("plotly_relayout", () => show([...chart.layout.xaxis.range])));

  for (const button of document.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const { scale = 1, shift = 0, until } = button.dataset;
      if (until !== undefined) return show([0, Number(until) || end]);
      const seconds = shown[1] - shown[0], wanted = Math.min(seconds * scale, end);
      const start = shown[0] + seconds * shift + (seconds - wanted) / 2, first = Math.min(Math.max(start, 0), end - wanted);
      show([first, first + wanted]);
    });
  }
}
