// Live figures: sets the texts that `/events` sends, asks for the page again where its rows are
// other ones, and draws charts. Pages are whole without it. Nothing from outside is ever HTML here.
"use strict";
(() => {
  const RELOAD_MS = 5000;
  const MOST_POINTS = 300;
  const HEIGHT = innerWidth < 640 ? 100 : 130;
  const byId = (id) => document.getElementById(id);
  const charts = new Map();
  let ticks = [];
  let reloadedAt = -RELOAD_MS;
  let reloading = false;
  // Messages that came while the page was asked for: it may be older than they are.
  let missed = [];

  // ---- texts ----

  const say = (text) => { byId("live").textContent = text; };

  function setCell(id, [text, tone, hint, value]) {
    const cell = byId(id);
    if (!cell) return;
    if (cell.textContent !== text) cell.textContent = text;
    cell.className = tone;
    if (hint) cell.title = hint; else cell.removeAttribute("title");
    if (value !== null) {
      const part = cell.closest("[data-value]");
      if (part) { part.dataset.value = value; drawBar(part.closest(".bar")); }
    }
  }

  function drawBar(bar) {
    const values = [...bar.querySelectorAll("li")].map((part) => Number(part.dataset.value));
    const whole = values.reduce((sum, value) => sum + value, 0) || 1;
    let begin = 0;
    bar.querySelectorAll(":scope > svg rect").forEach((rect, at) => {
      const width = 100 * values[at] / whole;
      rect.setAttribute("x", begin);
      rect.setAttribute("width", width);
      begin += width;
    });
  }

  function apply(said) {
    byId("at").textContent = said.t;
    if (said.s !== document.body.dataset.structure) return;
    for (const [id, cell] of Object.entries(said.c)) setCell(id, cell);
  }

  // ---- rows ----

  // The page again, as the server renders it: sections that are other ones are exchanged, and what
  // had the focus has it afterwards. A parsed document runs nothing.
  async function reload() {
    if (reloading || document.hidden) return;
    if (performance.now() - reloadedAt < RELOAD_MS) return;
    reloading = true;
    reloadedAt = performance.now();
    try {
      const answer = await fetch(document.body.dataset.at, { credentials: "same-origin" });
      if (!answer.ok) return;
      const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
      exchange(parsed);
      missed.forEach(apply);
    } catch {
      // The scheduler is away: the stream says so.
    } finally {
      reloading = false;
      missed = [];
    }
  }

  function exchange(parsed) {
    const focus = document.activeElement;
    const focused = focus && focus !== document.body
      ? [focus.id, focus.getAttribute("href")] : null;
    // A form that is being filled in, a chart, and a table that is open stay as they are.
    const stays = (node) => node.matches("form, figure");
    for (const section of document.querySelectorAll("main > section")) {
      const next = parsed.getElementById(section.id);
      if (!next) { section.remove(); continue; }
      const kept = [...section.children].filter(stays);
      for (const node of kept) {
        const same = node.id ? next.querySelector("#" + CSS.escape(node.id))
          : next.querySelector("form");
        if (same) same.replaceWith(node);
      }
      for (const details of next.querySelectorAll("details[id]")) {
        details.open = byId(details.id)?.open ?? details.open;
      }
      section.replaceWith(next);
    }
    const main = byId("main");
    for (const section of parsed.querySelectorAll("main > section")) main.append(section);
    for (const id of ["mode", "at"]) {
      const next = parsed.getElementById(id);
      if (next) { byId(id).textContent = next.textContent; byId(id).className = next.className; }
    }
    document.querySelectorAll(".trouble").forEach((node) => node.remove());
    parsed.querySelectorAll(".trouble").forEach((node) => main.querySelector("section").before(node));
    document.title = parsed.title;
    main.querySelector("h1").textContent = parsed.querySelector("h1").textContent;
    document.body.dataset.structure = parsed.body.dataset.structure;
    drawNew();
    if (focused) {
      const [id, href] = focused;
      const again = (href && document.querySelector(`a[href="${CSS.escape(href)}"]`))
        || (id && byId(id));
      if (again && again !== document.activeElement) again.focus({ preventScroll: true });
    }
  }

  // ---- charts ----

  // Asked once for each scheme: behind texts that just changed an answer costs a layout.
  const colors = new Map();
  const color = (name) => {
    if (!colors.has(name)) {
      const style = getComputedStyle(document.documentElement);
      colors.set(name, style.getPropertyValue(`--${name}`).trim());
    }
    return colors.get(name);
  };

  // Beside an axis there is room for "60K", not for "60,000".
  const compact = new Intl.NumberFormat("en", { notation: "compact" });
  const shown = (value) => value === null || value === undefined ? "no data" : String(value);

  // All times are UTC, as in the tables.
  const utc = (at, from, to) => new Date(at * 1000).toISOString().slice(from, to).replace("T", " ");

  function spec(lines, width) {
    const scale = lines[0].scale;
    const axis = () => color("quiet");
    const grid = { stroke: () => color("line"), width: 1 };
    return {
      width, height: HEIGHT,
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
      cursor: { sync: { key: "rose" }, drag: { x: true, y: false } },
      scales: {
        y: { range: (u, low, high) => [0, scale === "%" ? 100 : high > 0 ? high * 1.1 : 1] },
      },
      series: [{ label: "UTC", value: (u, at) => utc(at ?? u.data[0].at(-1) ?? 0, 0, 19) }, ...lines.map((line) => ({
        label: line.label, stroke: () => color(line.color), spanGaps: false,
        width: line.target ? 1 : 2, dash: line.target ? [6, 4] : [], points: { show: false },
        value: (u, value, at) => shown(u.cursor.idx == null ? u.data[at].at(-1) : value),
      }))],
      axes: [{
        stroke: axis, grid,
        values: (u, ticks, at, space, step) => ticks.map((tick) => (
          step >= 43200 ? utc(tick, 5, 16) : utc(tick, 11, step < 60 ? 19 : 16))),
        space: 80,
      }, {
        stroke: axis, label: scale, labelSize: 18, size: 52, grid,
        values: (u, ticks) => ticks.map((tick) => compact.format(tick)),
      }],
      hooks: { draw: [drawTicks] },
    };
  }

  // A line across the chart where a guest was stopped; its reason is in the table of changes.
  function drawTicks(u) {
    if (!u.root.closest("#chart-guest")) return;
    u.ctx.save();
    u.ctx.strokeStyle = color("bad");
    u.ctx.lineWidth = devicePixelRatio;
    for (const [at] of ticks) {
      const x = u.valToPos(at, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
    }
    u.ctx.restore();
  }

  async function draw() {
    const figures = [...document.querySelectorAll("figure[data-chart]")];
    if (!figures.length || typeof uPlot === "undefined") return;
    for (const source of new Set(figures.map((figure) => figure.dataset.source))) {
      let said;
      try {
        const answer = await fetch(source, { credentials: "same-origin" });
        if (!answer.ok) continue;
        said = await answer.json();
      } catch { continue; }
      if (said.ticks) ticks = said.ticks;
      for (const figure of figures.filter((each) => each.dataset.source === source)) {
        const data = said.charts[figure.dataset.chart];
        if (data) show(figure, data);
      }
    }
  }

  function show(figure, data) {
    const known = charts.get(figure.dataset.chart);
    if (known) { setData(known, data); return; }
    const place = figure.querySelector(".plot");
    place.hidden = false;
    const lines = [...place.querySelectorAll("i")].map((line) => line.dataset);
    // One axis a plot; they share the time and the pointer.
    const plots = [...new Set(lines.map((line) => line.scale))].map((scale) => {
      const own = [...lines.keys()].filter((at) => lines[at].scale === scale);
      const plot = new uPlot(
        spec(own.map((at) => lines[at]), place.clientWidth || 320), chosen(data, own), place);
      plot.root.setAttribute("aria-hidden", "true"); // the table beside it says the same
      return { plot, own };
    });
    charts.set(figure.dataset.chart, { plots, place, data });
  }

  const chosen = (data, own) => [data[0], ...own.map((at) => data[at + 1])];

  function setData(known, data) {
    known.data = data;
    for (const { plot, own } of known.plots) plot.setData(chosen(data, own));
  }

  // After an exchange: charts that went are let go, those that came are drawn.
  function drawNew() {
    for (const [key, { plots, place }] of charts) {
      if (!place.isConnected) {
        for (const { plot } of plots) plot.destroy();
        charts.delete(key);
      }
    }
    if (!document.querySelector("figure[data-chart] .plot[hidden]")) return;
    if (typeof uPlot === "undefined") location.reload(); else draw();
  }

  function addPoints(points) {
    for (const [key, values] of Object.entries(points)) {
      const known = charts.get(key);
      if (!known || values[0] === null) continue;
      const times = known.data[0];
      if (times.length && values[0] <= times[times.length - 1]) continue;
      setData(known, known.data.map((line, at) => [...line, values[at]].slice(-MOST_POINTS)));
    }
  }

  addEventListener("resize", () => {
    for (const { plots, place } of charts.values()) {
      for (const { plot } of plots) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colors.clear();
    for (const { plots } of charts.values()) for (const { plot } of plots) plot.redraw();
  });

  // ---- the stream ----

  function listen() {
    const at = encodeURIComponent(document.body.dataset.at);
    const stream = new EventSource(`/events?at=${at}`);
    let lost = false;
    stream.onopen = () => { say("live"); if (lost) draw(); lost = false; };
    stream.onerror = () => { say("the scheduler does not answer; figures are old"); lost = true; };
    stream.onmessage = (event) => {
      const begun = performance.now();
      const said = JSON.parse(event.data);
      if (reloading) missed = [...missed.slice(-9), said];
      else if (said.s !== document.body.dataset.structure) reload();
      apply(said);
      addPoints(said.p);
      performance.measure("rose-update", { start: begun, end: performance.now() });
      performance.clearMeasures("rose-update");
    };
    addEventListener("pagehide", () => stream.close());
    addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  }

  draw();
  // Days come from elsewhere, and no stream has their points.
  if (document.body.dataset.at.includes("range=")) setInterval(draw, 60000);
  listen();
})();
