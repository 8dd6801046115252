"use strict";
const charts = Array.from(document.querySelectorAll(".chart"));
const isTouch = window.matchMedia("(pointer: coarse)").matches;

async function unpack(element, type) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Blob([await new Response(stream).arrayBuffer()], { type });
}

async function draw(chart) {
  const { data, layout } = JSON.parse(chart.querySelector("script").textContent);
  if (isTouch) layout.dragmode = false; // a finger scrolls past it
  // Named one by one: plotly's own choice includes a button that sends the data to a server.
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const options = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: isTouch ? false : "hover" };
  await Plotly.newPlot(chart, data, layout, options);
}

for (const button of document.querySelectorAll("[data-file]")) {
  button.addEventListener("click", async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await unpack(button.querySelector("script"), "text/csv"));
    link.download = button.dataset.file;
    link.click();
  });
}

(async () => {
  try {
    for (const image of document.images) {
      image.src = URL.createObjectURL(await unpack(image.nextElementSibling, image.dataset.kind));
    }
    if (charts.length) {
      const script = document.createElement("script");
      script.text = await (await unpack(document.getElementById("plotly"), "text/javascript")).text();
      document.head.append(script);
    }
    for (const chart of charts) await draw(chart);
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    document.getElementById("trouble").hidden = false;
    document.documentElement.dataset.ready = String(error);
  }
})();
