"use strict";
(function () {
  const root = document.documentElement, dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const SCENES = 8; // browsers drop the oldest of too many WebGL contexts
  const plots = Array.from(document.querySelectorAll(".plot"));
  let charts = [], printing = false, driver = null, pending = null, applied = null;

  // -- what Python packed: gzip, four bytes in five of 85 letters; the cells of a table by column

  async function unpack(name, type) {
    const element = document.getElementById("packed-" + name), text = element.textContent, short = (5 - text.length % 5) % 5;
    const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%/()*+-;,=.?@^_`{|}~", digits = new Uint8Array(128);
    for (let i = 0; i < 85; i++) digits[letters.charCodeAt(i)] = i;
    const words = new DataView(new ArrayBuffer((text.length + short) / 5 * 4));
    for (let i = 0, to = 0; i < text.length; to += 4) {
      let word = 0;
      for (const end = i + 5; i < end; i++) word = word * 85 + (i < text.length ? digits[text.charCodeAt(i)] : 84);
      words.setUint32(to, word);
    }
    const packed = new Blob([new Uint8Array(words.buffer, 0, words.byteLength - short)]);
    const content = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
    const columns = Number(element.dataset.columns || 0);
    if (!columns) return new Blob([content], { type });
    const cells = new TextDecoder().decode(content).split("\n"), rows = cells.length / columns, lines = [];
    for (let row = 0; row < rows; row++) {
      const line = [];
      for (let column = 0; column < columns; column++) line.push(cells[column * rows + row]);
      lines.push(line.join(",") + "\n");
    }
    return new Blob(lines, { type });
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  // -- charts: plotly's traces and layouts, in the page's colours

  function colours() {
    const light = printing || !dark.matches, of = (name) => getComputedStyle(root).getPropertyValue(name).trim();
    return light ? { text: "#1a1a1a", line: "#dcdfe3", raised: "#f6f7f8" } : { text: of("--text"), line: of("--line"), raised: of("--raised") };
  }

  function layoutOf(chart) {
    const c = colours(), layout = JSON.parse(JSON.stringify(chart.layout));
    Object.assign(layout, { font: { color: c.text, family: "system-ui, sans-serif" }, autosize: true, uirevision: "same",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hoverlabel: { bgcolor: c.raised, font: { color: c.text }, bordercolor: c.line },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: c.text, activecolor: c.text } });
    const scene = layout.scene || layout;
    for (const axis of ["xaxis", "yaxis", "zaxis"]) {
      if (!scene[axis]) continue;
      Object.assign(scene[axis], { color: c.text, gridcolor: c.line, linecolor: c.line, zerolinecolor: c.line });
      if (layout.scene) Object.assign(scene[axis], { backgroundcolor: c.raised, showbackground: true });
    }
    if (coarse && !layout.scene) layout.dragmode = false; // a finger scrolls past it
    return layout;
  }

  function render(plot) {
    const chart = charts[plot.dataset.chart], scene = chart.kind === "scene";
    const ink = (key, value) => (value === "#000000" && key === "color" ? colours().text : value);
    const traces = JSON.parse(JSON.stringify(chart.traces), chart.kind === "lines" ? ink : undefined);
    const name = plot.closest("figure").querySelector("figcaption").textContent;
    return Plotly.react(plot, traces, layoutOf(chart), {
      displaylogo: false, responsive: true, displayModeBar: coarse ? false : "hover",
      // Named one by one: plotly's own choice includes a button that sends the data to a server.
      modeBarButtons: [scene ? ["toImage", "zoom3d", "pan3d", "tableRotation", "resetCameraDefault3d"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { filename: name.replace(/[^\w.-]+/g, "-").slice(0, 60) },
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
    Promise.all(scenes().filter((plot) => plot !== leader).map((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(text) }))).finally(() => {
      const next = pending;
      driver = pending = null;
      if (next) follow(leader, { "scene.camera": next });
    });
  }

  // After the mouse is let go a camera may move on for a moment without telling.
  function settle(leader) {
    const scene = leader._fullLayout.scene && leader._fullLayout.scene._scene;
    if (!scene || !scene.getCamera || driver) return;
    applied = JSON.stringify(scene.getCamera());
    scenes().forEach((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(applied) }));
  }

  const scenes = () => plots.filter((plot) => plot.classList.contains("scene") && !plot.closest("figure").hidden);

  function webgl() {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch (error) {
      return false;
    }
  }

  async function drawCharts() {
    let room = webgl() ? SCENES : 0;
    charts = JSON.parse(await (await unpack("charts")).text());
    const code = document.createElement("script");
    code.textContent = await (await unpack("plotly")).text();
    document.head.append(code);
    for (const plot of plots) {
      const scene = plot.classList.contains("scene");
      if (scene && room-- <= 0) { // its map stands beside it
        plot.closest("figure").hidden = true;
        continue;
      }
      await render(plot);
      if (scene) {
        plot.on("plotly_relayouting", (change) => follow(plot, change));
        plot.on("plotly_relayout", (change) => follow(plot, change, true));
      }
      await new Promise((done) => setTimeout(done, 0)); // the page stays usable while it fills
    }
  }

  const redraw = () => Promise.all(plots.filter((plot) => !plot.closest("figure").hidden).map(render));

  async function showPictures() {
    for (const image of document.querySelectorAll("img[data-picture]")) {
      image.src = URL.createObjectURL(await unpack("picture-" + image.dataset.picture, image.dataset.type));
    }
  }

  // -- tables

  function tableText(table) {
    const quoted = (cell) => {
      const text = cell.textContent.trim();
      return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    return Array.from(table.rows, (row) => Array.from(row.cells, quoted).join(",")).join("\n") + "\n";
  }

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

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    try {
      if (button.classList.contains("sort")) order(button.closest("th"));
      if (button.dataset.packed) save(await unpack(button.dataset.packed), button.dataset.name);
      if (button.dataset.table) {
        const copy = button.closest("table").cloneNode(true);
        copy.querySelectorAll("caption").forEach((caption) => caption.remove());
        save(new Blob([tableText(copy)], { type: "text/csv" }), button.dataset.table + ".csv");
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
      await showPictures();
      if (plots.length) await drawCharts();
      dark.addEventListener("change", redraw);
      window.addEventListener("beforeprint", () => { printing = true; redraw(); });
      window.addEventListener("afterprint", () => { printing = false; redraw(); });
      window.addEventListener("hashchange", unfold);
      unfold();
      root.dataset.ready = "yes";
    } catch (error) {
      trouble(error);
    }
  })();
})();
