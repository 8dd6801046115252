"use strict";
(function () {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const SCENES = 8; // browsers drop the oldest of too many WebGL contexts
  const THEMES = {
    light: { text: "#1a1a1a", soft: "#575757", line: "#dcdfe3", raised: "#f6f7f8", empty: "#bbbbbb", back: "#ffffff" },
    dark: { text: "#e8e8e8", soft: "#b3b6bb", line: "#3b4049", raised: "#1f2228", empty: "#565b63", back: "#16181c" },
  };
  const hiddenRuns = new Set();
  let data, printing = false, driver = null, pending = null, applied = null;
  const plots = Array.from(document.querySelectorAll(".plot"));
  const theme = () => THEMES[dark.matches && !printing ? "dark" : "light"];
  const ink = (colour) => (colour === "#000000" ? theme().text : colour);

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function tableText(table) {
    const quoted = (cell) => {
      const text = cell.textContent.trim();
      return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    return Array.from(table.rows, (row) => Array.from(row.cells, quoted).join(",")).join("\n") + "\n";
  }

  // -- figures: what the report describes, in plotly's words

  function look(run) {
    const own = data.looks[run === null || run === undefined ? 0 : run];
    return { colour: ink(own.colour), mark: own.mark, dash: own.dash };
  }

  function faded(colour, alpha) {
    const n = parseInt(colour.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  }

  const visible = (run) => run === null || run === undefined || !hiddenRuns.has(run);

  function axis(more) {
    const t = theme();
    return Object.assign({ color: t.text, gridcolor: t.line, linecolor: t.line, zeroline: false, automargin: true,
      tickfont: { size: 12 }, title: { font: { size: 13 }, standoff: 8 } }, more);
  }

  function base(spec, xs) {
    const t = theme();
    const whole = spec.whole && xs && xs.every((x) => Number.isInteger(x));
    const reach = whole && xs.length ? Math.max(...xs) - Math.min(...xs) : 0;
    const x = axis({});
    x.title = Object.assign({ text: spec.xtitle || "" }, x.title);
    if (whole) Object.assign(x, reach <= 10 ? { dtick: 1, tickformat: "d" } : { nticks: 8, tickformat: "d" });
    if (whole && xs.length && reach === 0) x.range = [xs[0] - 1, xs[0] + 1];
    const y = axis({});
    y.title = Object.assign({ text: spec.ytitle || "" }, y.title);
    if (spec.share) y.tickformat = "~%";
    if (spec.log) y.type = "log";
    if (spec.yrange) y.range = spec.yrange;
    if (spec.zero) Object.assign(y, { zeroline: true, zerolinecolor: t.soft, zerolinewidth: 1 });
    return {
      xaxis: x, yaxis: y, font: { color: t.text, family: "system-ui, sans-serif" }, margin: { l: 48, r: 14, t: coarse ? 12 : 30, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true, uirevision: "kept",
      hoverlabel: { bgcolor: t.raised, font: { color: t.text }, bordercolor: t.line, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: t.soft, activecolor: t.text }, dragmode: coarse ? false : "zoom",
      legend: { orientation: "h", y: -0.28, font: { size: 12 } },
    };
  }

  const number = (spec) => (spec.share ? "%{y:.4~%}" : "%{y:.4~g}");

  const builders = {
    lines(spec, frame) {
      const traces = [], xs = frame.series.flatMap((s) => s.x);
      for (const s of frame.series) {
        if (!visible(s.run)) continue;
        const own = look(s.look === undefined ? s.run : s.look);
        if (s.low && !s.faint) {
          const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", x: s.x };
          traces.push(Object.assign({}, edge, { y: s.low }),
            Object.assign({}, edge, { y: s.high, fill: "tonexty", fillcolor: faded(own.colour, 0.16) }));
        }
      }
      for (const s of frame.series) {
        if (!visible(s.run)) continue;
        const own = look(s.look === undefined ? s.run : s.look), few = s.x.length <= 30;
        const trace = {
          type: "scatter", mode: few ? "lines+markers" : "lines", x: s.x, y: s.y, name: s.name, opacity: s.faint ? 0.35 : 1,
          line: { color: own.colour, dash: own.dash, width: s.faint ? 1 : 2 },
          marker: { color: own.colour, symbol: own.mark, size: s.faint ? 4 : 7 },
          hovertemplate: `<b>${s.name}</b><br>${spec.xtitle} %{x}<br>${number(spec)}<extra></extra>`,
        };
        if (s.error && s.error.some((e) => e > 0)) trace.error_y = { type: "data", array: s.error, color: own.colour, thickness: 1 };
        traces.push(trace);
      }
      return [traces, base(spec, xs)];
    },

    bars(spec, frame) {
      const traces = frame.series.filter((s) => visible(s.run)).map((s) => ({
        type: "bar", x: s.x, y: s.y, name: s.name, marker: { color: look(s.look).colour },
        error_y: s.error && s.error.some((e) => e > 0) ? { type: "data", array: s.error, thickness: 1, width: 2, color: theme().soft } : undefined,
        hovertemplate: `<b>${s.name}</b><br>${spec.xtitle} %{x}<br>${number(spec)}<extra></extra>`,
      }));
      const layout = base(spec, null);
      Object.assign(layout.xaxis, { type: "category", categoryorder: "array", categoryarray: frame.labels });
      layout.barmode = "group";
      return [traces, layout];
    },

    terms(spec, frame) {
      const colours = ["#0072B2", "#E69F00", "#CC79A7"], shapes = ["", "/", "x"];
      const traces = frame.series.map((s) => ({
        type: "bar", x: s.x, y: s.y, name: s.name,
        marker: { color: colours[s.term], pattern: { shape: shapes[s.term], fillmode: "overlay", fgcolor: theme().back, size: 6, solidity: 0.25 } },
        hovertemplate: `<b>${s.name}</b><br>%{x}<br>${number(spec)}<extra></extra>`,
      }));
      if (frame.marks) {
        traces.push({
          type: "scatter", mode: "markers", x: frame.labels, y: frame.marks, name: "true change",
          marker: { symbol: "diamond", size: 9, color: theme().back, line: { color: theme().text, width: 1.5 } },
          hovertemplate: `<b>true change</b><br>%{x}<br>${number(spec)}<extra></extra>`,
        });
      }
      const layout = base(Object.assign({}, spec, { zero: true }), null);
      Object.assign(layout.xaxis, { type: "category", categoryorder: "array", categoryarray: frame.labels });
      layout.barmode = frame.stacked ? "relative" : "group";
      layout.showlegend = true;
      layout.margin.b = 70;
      return [traces, layout];
    },

    boxes(spec, frame) {
      const traces = frame.series.filter((s) => visible(s.run)).map((s) => {
        const own = look(s.look);
        return {
          type: "box", x: s.x.map((i) => frame.labels[i]), y: s.y, text: s.text, name: s.name, boxpoints: "all", jitter: 0.5,
          pointpos: 0, boxmean: true, line: { color: own.colour, width: 1.2 }, fillcolor: "rgba(0,0,0,0)", offsetgroup: s.name,
          marker: { color: faded(own.colour, 0.6), symbol: own.mark, size: 6 },
          hovertemplate: `<b>${s.name}</b><br>%{text}<br>${number(spec)}<extra></extra>`,
        };
      });
      const layout = base(spec, null);
      Object.assign(layout.xaxis, { type: "category", categoryorder: "array", categoryarray: frame.labels });
      layout.boxmode = "group";
      return [traces, layout];
    },

    heatmap(spec, frame) {
      const scale = data.colours[spec.colours], range = frame.range || spec.range, t = theme();
      const count = scale.length - 1;
      const value = spec.share ? "%{customdata:.4~%}" : "%{customdata:.4~g}";
      const bar = { thickness: 12, outlinewidth: 0, tickfont: { size: 11, color: t.text }, len: 1, xpad: 4 };
      if (spec.share) bar.tickformat = "~%";
      if (frame.ticks) Object.assign(bar, { tickvals: frame.ticks.map((p) => p[0]), ticktext: frame.ticks.map((p) => p[1]) });
      const traces = [{
        type: "heatmap", x: frame.x, y: frame.y, z: frame.z, customdata: frame.v || frame.z, zmin: range[0], zmax: range[1], xgap: 1, ygap: 1,
        colorscale: scale.map((c, i) => [i / count, c]), colorbar: bar, hoverongaps: false,
        hovertemplate: `${spec.ytitle} %{y}<br>${spec.xtitle} %{x}<br>${spec.what} ${value}<extra></extra>`,
      }];
      if (frame.dots && frame.dots.length) {
        traces.push({
          type: "scatter", mode: "markers", x: frame.dots.map((p) => frame.x[p[0]]), y: frame.dots.map((p) => frame.y[p[1]]), hoverinfo: "skip",
          marker: { symbol: "circle", size: 5, color: "#222222", line: { color: "#ffffff", width: 1 } },
        });
      }
      const layout = base(spec, null);
      layout.plot_bgcolor = t.empty;
      // Ranges of their own: marks at the edge would widen them by an empty band.
      Object.assign(layout.xaxis, { type: "category", showgrid: false, categoryorder: "array", categoryarray: frame.x,
        range: [-0.5, frame.x.length - 0.5] });
      Object.assign(layout.yaxis, { type: "category", showgrid: false, categoryorder: "array", categoryarray: frame.y,
        range: [frame.y.length - 0.5, -0.5], tickformat: "" });
      if (frame.x.length <= 16) layout.xaxis.dtick = 1;
      if (frame.y.length <= 24) layout.yaxis.dtick = 1;
      if (spec.square) Object.assign(layout.yaxis, { scaleanchor: "x", constrain: "domain" });
      if (spec.square) layout.xaxis.constrain = "domain";
      return [traces, layout];
    },

    map(spec, frame) { // the same numbers and colours as the scene's
      const s = frame.surface, layout = base({}, null);
      const traces = [{ type: "contour", x: s.x, y: s.y, z: s.z, zmin: s.cmin, zmax: s.cmax, colorscale: s.colorscale, text: s.text,
        hoverinfo: "text", showscale: false, line: { color: "rgba(255, 255, 255, 0.5)", width: 0.5 },
        contours: { coloring: "fill", start: s.cmin, end: s.cmax, size: (s.cmax - s.cmin) / 20 } }];
      for (const m of frame.marks) {
        traces.push({ type: "scatter", mode: m.mode, x: m.x, y: m.y, text: m.text, hoverinfo: "text", line: { color: "#000000" },
          marker: { color: "#ffffff", line: { color: "#000000", width: 1 } } });
      }
      for (const name of ["xaxis", "yaxis"]) {
        layout[name].title.text = spec.scene[name].title.text;
        layout[name].range = spec.scene[name].range;
      }
      return [traces, layout];
    },

    scene(spec, frame) {
      const t = theme(), layout = base({}, null);
      const scene = JSON.parse(JSON.stringify(spec.scene));
      for (const name of ["xaxis", "yaxis", "zaxis"]) {
        Object.assign(scene[name], { color: t.text, gridcolor: t.line, zerolinecolor: t.line, linecolor: t.line, backgroundcolor: t.raised,
          showbackground: true });
      }
      Object.assign(layout, { scene: scene, margin: { l: 0, r: 0, t: 0, b: 0 }, dragmode: "turntable" });
      return [[frame.surface].concat(frame.marks), layout];
    },
  };

  function chosen(spec) {
    return spec.controls.map((id) => {
      const control = document.querySelector(`[data-control="${id}"]`);
      return control.type === "range" ? JSON.parse(control.dataset.options)[control.value] : control.value;
    }).join("|");
  }

  function render(plot) {
    const spec = data.figures[plot.dataset.figure], frame = spec.frames[chosen(spec)];
    if (spec.kind === "heatmap" && !plot.dataset.tall) {
      const rows = Math.max(...Object.values(spec.frames).map((f) => f.y.length));
      plot.style.height = (spec.square ? 340 : Math.min(Math.max(110 + 21 * rows, 240), 640)) + "px";
      plot.dataset.tall = "yes";
    }
    const found = frame && (!frame.x || frame.x.length) ? frame : null;
    const flat = spec.kind !== "scene" || plot.dataset.flat;
    const [traces, layout] = found ? builders[spec.kind === "scene" && flat ? "map" : spec.kind](spec, found) : [[], base(spec, null)];
    if (!found) {
      layout.annotations = [{ text: "nothing here for this choice", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
    }
    const caption = plot.parentElement.querySelector("figcaption").textContent;
    return Plotly.react(plot, traces, layout, {
      displaylogo: false, responsive: true, displayModeBar: coarse ? false : "hover",
      // Named one by one: plotly's own choice includes a button that sends the data to a server.
      modeBarButtons: [flat ? ["toImage", "zoom2d", "pan2d", "resetScale2d"] : ["toImage", "zoom3d", "pan3d", "tableRotation", "resetCameraDefault3d"]],
      toImageButtonOptions: { filename: caption.replace(/[^\w.-]+/g, "-").slice(0, 60) },
      showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "",
    });
  }

  // Setting the others' cameras makes them report a move of their own, which must not echo; and the last move of a
  // drag must arrive, although the others may still be busy with the one before.
  function follow(leader, change, ended) {
    const camera = change["scene.camera"], text = JSON.stringify(camera);
    if (!camera || text === applied) return;
    if (ended && !driver) setTimeout(() => settle(leader), 200);
    if (driver) {
      if (leader === driver) pending = camera;
      return;
    }
    driver = leader;
    applied = text;
    const others = plots.filter((plot) => plot !== leader && plot.classList.contains("scene") && !plot.dataset.flat);
    Promise.all(others.map((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(text) }))).finally(() => {
      const next = pending;
      driver = pending = null;
      if (next) follow(leader, { "scene.camera": next });
    });
  }

  // After the mouse is let go a camera may move on for a moment without telling.
  function settle(leader) {
    const scene = leader._fullLayout.scene && leader._fullLayout.scene._scene;
    if (!scene || !scene.getCamera || driver) return;
    const camera = scene.getCamera();
    applied = JSON.stringify(camera);
    plots.filter((plot) => plot.classList.contains("scene") && !plot.dataset.flat)
      .forEach((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(applied) }));
  }

  function webgl() {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch (error) {
      return false;
    }
  }

  async function drawAll() {
    let scenes = webgl() ? 0 : SCENES;
    for (const plot of plots) {
      if (plot.classList.contains("map")) plot.dataset.flat = "yes";
      const scene = plot.classList.contains("scene");
      if (scene && scenes++ >= SCENES) plot.dataset.flat = "yes";
      await render(plot);
      if (scene && !plot.dataset.flat) {
        plot.on("plotly_relayouting", (change) => follow(plot, change));
        plot.on("plotly_relayout", (change) => follow(plot, change, true));
      }
      await new Promise((done) => setTimeout(done, 0)); // the page stays usable while it fills
    }
  }

  const redraw = (which) => Promise.all(plots.filter(which).map(render));

  function listen() {
    dark.addEventListener("change", () => redraw(() => true));
    window.addEventListener("beforeprint", () => { printing = true; redraw(() => true); });
    window.addEventListener("afterprint", () => { printing = false; redraw(() => true); });
    document.addEventListener("input", (event) => {
      const control = event.target;
      if (control.dataset.control) {
        if (control.type === "range") {
          const value = JSON.parse(control.dataset.options)[control.value];
          control.setAttribute("aria-valuetext", value);
          control.parentElement.querySelector("output").textContent = value;
        }
        redraw((plot) => data.figures[plot.dataset.figure].controls.includes(control.dataset.control));
      }
      if (control.dataset.toggle !== undefined) {
        const run = Number(control.dataset.toggle);
        if (control.checked) hiddenRuns.delete(run); else hiddenRuns.add(run);
        document.querySelectorAll(`figure[data-run="${run}"]`).forEach((figure) => { figure.hidden = !control.checked; });
        redraw((plot) => !plot.closest("figure").hidden).then(() => window.dispatchEvent(new Event("resize")));
      }
    });
  }

  // -- tables

  function worth(row, column) {
    const text = row.cells[column].textContent.trim().replaceAll(",", "").replace("−", "-"), value = parseFloat(text);
    return Number.isNaN(value) ? text : value;
  }

  function order(head) {
    const rows = Array.from(head.closest("table").tBodies[0].rows), column = head.cellIndex;
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    head.parentElement.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    rows.sort((a, b) => {
      const [x, y] = [worth(a, column), worth(b, column)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // what has no number stands last
      return way * (typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    });
    rows.forEach((row) => row.parentElement.append(row));
  }

  // A link to what is folded away opens it.
  function unfold() {
    const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (place) place.scrollIntoView();
  }

  window.addEventListener("hashchange", unfold);
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    try {
      if (button.classList.contains("sort")) order(button.closest("th"));
      if (button.dataset.file !== undefined) save(await unpack("file-" + button.dataset.file), data.files[button.dataset.file]);
      if (button.dataset.table) {
        const shown = button.closest("table").cloneNode(true);
        shown.querySelectorAll("caption").forEach((caption) => caption.remove());
        save(new Blob([tableText(shown)], { type: "text/csv" }), button.dataset.table + ".csv");
      }
    } catch (error) {
      trouble(error);
    }
  });

  function trouble(error) {
    const box = document.getElementById("trouble");
    box.textContent = "DecompressionStream" in window ? "The figures could not be drawn: " + error.message + ". The tables hold the numbers."
      : "The figures and downloads need a browser of 2023 or later. The tables hold the numbers.";
    box.hidden = false;
    root.dataset.ready = "failed";
  }

  (async function () {
    try {
      data = JSON.parse(await (await unpack("data")).text());
      if (plots.length) {
        const code = document.createElement("script");
        code.textContent = await (await unpack("plotly")).text();
        document.head.append(code);
        await drawAll();
      }
      listen();
      unfold();
      root.dataset.ready = "yes";
    } catch (error) {
      trouble(error);
    }
  })();
})();
