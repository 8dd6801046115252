"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plots = Array.from(document.querySelectorAll(".scene"));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let moving = false;

  function colours() {
    const css = getComputedStyle(document.documentElement);
    const value = (name) => css.getPropertyValue(name).trim();
    const out = {
      "paper_bgcolor": "rgba(0,0,0,0)", "font.color": value("--text"), "scene.bgcolor": "rgba(0,0,0,0)",
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": value("--soft"), "modebar.activecolor": value("--text"),
      "hoverlabel.bgcolor": value("--raised"), "hoverlabel.font.color": value("--text"),
    };
    for (const axis of ["xaxis", "yaxis", "zaxis"]) {
      out["scene." + axis + ".gridcolor"] = value("--line");
      out["scene." + axis + ".zerolinecolor"] = value("--line");
      out["scene." + axis + ".linecolor"] = value("--line");
      out["scene." + axis + ".backgroundcolor"] = value("--raised");
      out["scene." + axis + ".showbackground"] = true;
      out["scene." + axis + ".color"] = value("--text");
    }
    return out;
  }

  // Setting the others' cameras makes them report a move of their own; `moving` keeps that from echoing.
  function follow(leader, change) {
    const camera = change["scene.camera"];
    if (moving || !camera) return;
    moving = true;
    const others = plots.filter((plot) => plot !== leader);
    Promise.all(others.map((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(JSON.stringify(camera)) })))
      .finally(() => { moving = false; });
  }

  const options = {
    displaylogo: false, responsive: true,
    // Named one by one: plotly's own choice includes a button that sends the data to a server.
    modeBarButtons: [["toImage", "zoom3d", "pan3d", "tableRotation", "resetCameraDefault3d"]],
    showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "",
  };
  Promise.all(plots.map((plot, i) =>
    Plotly.newPlot(plot, [data.scenes[i]].concat(data.marks[i]), JSON.parse(JSON.stringify(data.layout)), options)
      .then(() => Plotly.relayout(plot, colours()))
      .then(() => {
        plot.on("plotly_relayouting", (change) => follow(plot, change));
        plot.on("plotly_relayout", (change) => follow(plot, change));
      })
  )).then(() => { document.documentElement.dataset.ready = "yes"; });
  dark.addEventListener("change", () => plots.forEach((plot) => Plotly.relayout(plot, colours())));
})();
