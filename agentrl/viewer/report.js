"use strict";
const told = document.getElementById("told");
// A touch screen shows no tooltips: a tap puts the tooltip's text in a bar at the bottom.
document.addEventListener("click", (event) => {
  const token = event.target.closest("bdi[title]");
  const inChart = event.target.closest("svg *");
  const owner = inChart && (inChart.querySelector(":scope > title") || inChart.parentNode.querySelector(":scope > title"));
  const text = token ? token.title : owner ? owner.textContent : "";
  told.textContent = text;
  told.hidden = text === "";
});
// Closed sections are not printed.
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
