"use strict";
(function () {
  const root = document.documentElement;
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const SCENES = 8; // browsers drop the oldest of too many WebGL contexts
  const plots = Array.from(document.querySelectorAll(".plot"));

  // gzip in base 85: four bytes in five letters, a twentieth smaller than base 64
  async function unpack(name, type) {
    const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%/()*+-;,=.?@^_`{|}~";
    const text = document.getElementById("packed-" + name).textContent, missing = (5 - text.length % 5) % 5;
    const digits = new Uint8Array(128).fill(84);
    for (let i = 0; i < 85; i++) digits[letters.charCodeAt(i)] = i;
    const padded = text + "~".repeat(missing), words = new DataView(new ArrayBuffer(padded.length / 5 * 4));
    for (let i = 0; i < padded.length; i += 5) {
      let word = 0;
      for (let j = i; j < i + 5; j++) word = word * 85 + digits[padded.charCodeAt(j)];
      words.setUint32(i / 5 * 4, word);
    }
    const packed = new Blob([new Uint8Array(words.buffer, 0, words.byteLength - missing)]);
    const content = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    return new Blob([await new Response(content).arrayBuffer()], { type });
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

  // -- charts and pictures

  function render(plot, chart) {
    const scene = chart.kind === "scene";
    const name = plot.closest("figure").querySelector("figcaption").textContent;
    if (coarse && !scene) chart.layout.dragmode = false; // a finger scrolls past it
    const layout = { autosize: true, font: { family: "system-ui, sans-serif" }, ...chart.layout };
    return Plotly.newPlot(plot, { data: chart.traces, layout, config: {
      displaylogo: false, responsive: true, displayModeBar: coarse ? false : "hover",
      // Named one by one: plotly's own choice includes a button that sends the data to a server.
      modeBarButtons: [scene ? ["toImage", "zoom3d", "pan3d", "tableRotation", "resetCameraDefault3d"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { filename: name.replace(/[^\w.-]+/g, "-").slice(0, 60) },
      showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "",
    } });
  }

  // All surfaces take the camera of the one that was touched last; it moves on a moment after it is let go.
  function linkCameras(scenes) {
    let leader = null, camera = "";
    for (const plot of scenes) {
      for (const kind of ["pointerdown", "wheel"]) plot.addEventListener(kind, () => { leader = plot; }, true);
    }
    setInterval(() => {
      const text = leader ? JSON.stringify(leader._fullLayout.scene._scene.getCamera()) : camera;
      if (text === camera) return;
      camera = text;
      scenes.filter((plot) => plot !== leader).forEach((plot) => Plotly.relayout(plot, { "scene.camera": JSON.parse(text) }));
    }, 50);
  }

  function hasWebgl() {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch (error) {
      return false;
    }
  }

  async function drawCharts() {
    const charts = JSON.parse(await (await unpack("charts")).text());
    const code = document.createElement("script");
    code.textContent = await (await unpack("plotly")).text();
    document.head.append(code);
    const scenes = plots.filter((plot) => plot.classList.contains("scene")), turned = scenes.slice(0, hasWebgl() ? SCENES : 0);
    for (const plot of plots) {
      if (scenes.includes(plot) && !turned.includes(plot)) plot.closest("figure").hidden = true; // its map stands beside it
      else await render(plot, charts[plot.dataset.chart]);
      await new Promise((done) => setTimeout(done, 0)); // the page stays usable while it fills
    }
    linkCameras(turned);
  }

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

  function valueOf(row, column) {
    const text = row.cells[column].textContent.trim().replaceAll(",", "").replace("−", "-"), value = parseFloat(text);
    return Number.isNaN(value) ? text : value;
  }

  function sort(head) {
    const rows = Array.from(head.closest("table").tBodies[0].rows), column = head.cellIndex;
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    head.parentElement.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    rows.sort((a, b) => {
      const [x, y] = [valueOf(a, column), valueOf(b, column)];
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
      if (button.classList.contains("sort")) sort(button.closest("th"));
      if (button.dataset.packed) save(await unpack(button.dataset.packed), button.dataset.name);
      if (button.dataset.table) save(new Blob([tableText(button.closest("table"))], { type: "text/csv" }), button.dataset.table + ".csv");
    } catch (error) {
      showError(error);
    }
  });

  function showError(error) {
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
      window.addEventListener("hashchange", unfold);
      unfold();
      root.dataset.ready = "yes";
    } catch (error) {
      showError(error);
    }
  })();
})();
