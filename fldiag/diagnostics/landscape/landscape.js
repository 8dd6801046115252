"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plots = Array.from(document.querySelectorAll(".scene")), maps = Array.from(document.querySelectorAll(".map"));
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

  // The same numbers and colours as the scene's, seen from above.
  function drawMap(plot, i) {
    const s = data.scenes[i], css = colours(), axes = data.layout.scene, layout = { margin: { l: 48, r: 14, t: 30, b: 44 }, autosize: true,
      showlegend: false, plot_bgcolor: "rgba(0,0,0,0)", paper_bgcolor: "rgba(0,0,0,0)", font: { color: css["font.color"] },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css["modebar.color"], activecolor: css["modebar.activecolor"] } };
    for (const name of ["xaxis", "yaxis"]) layout[name] = { title: axes[name].title, range: axes[name].range, zeroline: false, automargin: true };
    const traces = [{ type: "contour", x: s.x, y: s.y, z: s.z, zmin: s.cmin, zmax: s.cmax, colorscale: s.colorscale, text: s.text,
      hoverinfo: "text", showscale: false, line: { color: "rgba(255, 255, 255, 0.5)", width: 0.5 },
      contours: { coloring: "fill", start: s.cmin, end: s.cmax, size: (s.cmax - s.cmin) / 20 } }];
    for (const m of data.marks[i]) {
      traces.push({ type: "scatter", mode: m.mode, x: m.x, y: m.y, text: m.text, hoverinfo: "text", line: { color: "#000000" },
        marker: { color: "#ffffff", line: { color: "#000000", width: 1 } } });
    }
    return Plotly.react(plot, traces, layout, Object.assign({}, options, { modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] }));
  }

  async function start() {
    const code = document.createElement("script");
    code.textContent = await (await unpack("plotly")).text();
    document.head.append(code);
    await Promise.all(plots.map((plot, i) =>
      Plotly.newPlot(plot, [data.scenes[i]].concat(data.marks[i]), JSON.parse(JSON.stringify(data.layout)), options)
        .then(() => Plotly.relayout(plot, colours()))
        .then(() => {
          plot.on("plotly_relayouting", (change) => follow(plot, change));
          plot.on("plotly_relayout", (change) => follow(plot, change));
        })
    ));
    await Promise.all(maps.map(drawMap));
    document.documentElement.dataset.ready = "yes";
  }

  start();
  dark.addEventListener("change", () => {
    plots.forEach((plot) => Plotly.relayout(plot, colours()));
    maps.forEach(drawMap);
  });
})();
