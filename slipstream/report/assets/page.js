// Draws a report from its data; charts.py and page.py define the data.
"use strict";
let D = JSON.parse(document.getElementById("data").textContent);
const RUN_DASH = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 4], [12, 4], [6, 2, 2, 2]];
const SECTIONS = [
  ["learning", "Learning"], ["time", "Time"], ["lengths", "Lengths"], ["speculation", "Speculation"],
  ["stability", "Stability"], ["failures", "Lost and failed"], ["samples", "Samples"],
  ["before", "Before RL"], ["run", "Run"],
];
const view = { x: "step", smooth: "auto", theme: null };
try { view.theme = localStorage.getItem("slipstream-theme"); } catch (error) { /* applies to this page only */ }
const plots = new Map(); // by chart id: {u, chart, holder, hidden, axis}
const kept = new Map(); // {hidden, zoom} by chart id, kept when the page is redrawn

// --- small helpers -------------------------------------------------------------------------------
function el(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => css(`--c${i % 10}`);
function partColor(name) {
  // The same color in every chart of wall time: ten colors, then lighter, then darker variants.
  const known = D.parts.indexOf(name), i = known < 0 ? D.parts.length : known, round = Math.floor(i / 10);
  if (round === 0) return color(i);
  const dark = document.documentElement.dataset.theme === "dark", toward = (round === 1) === dark ? 0 : 255;
  const n = parseInt(color(i).slice(1), 16), mixed = [n >> 16, (n >> 8) & 255, n & 255].map((v) => Math.round(0.52 * v + 0.48 * toward));
  return `#${mixed.map((v) => v.toString(16).padStart(2, "0")).join("")}`;
}
function short(v) {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e7)) return v.toExponential(1).replace("e+", "e");
  if (a >= 1000) return v.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(+v.toPrecision(4));
}
function seconds(s) {
  if (s < 1) return `${(1000 * s).toFixed(0)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 5400) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${(s / 3600).toFixed(1)} h`;
}
const percent = (v) => `${(100 * v).toFixed(Math.abs(v) < 0.0995 ? 1 : 0)} %`;

// --- theme ---------------------------------------------------------------------------------------
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const dark = view.theme ? view.theme === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}
function setTheme() {
  view.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("slipstream-theme", view.theme); } catch (error) { /* not allowed in private windows */ }
  applyTheme(); render();
}
prefersDark.addEventListener("change", () => { applyTheme(); render(); });

// --- charts --------------------------------------------------------------------------------------
function axisOf(chart) {
  // Falls back to steps if a run has no times or token counts.
  const usable = (kind) => chart.lines.every((l) => D.runs[l.run].steps[chart.about][kind].length > 0);
  return usable(view.x) ? view.x : "step";
}
function windowOf(n) {
  if (view.smooth === "auto") return Math.max(n < 6 ? 1 : 3, Math.floor(n / 12) | 1);
  return +view.smooth;
}
function smoothed(y, w) {
  // Mean of the w values around each point, and the 95 % interval of that mean. Uses running sums of
  // differences from one value, because sums of squares of large numbers would lose precision.
  const mean = [], low = [], high = [], reach = Math.floor(w / 2), base = y.find((v) => v !== null) ?? 0;
  const count = [0], sum = [0], squares = [0];
  for (const v of y) {
    const d = v === null ? 0 : v - base;
    count.push(count.at(-1) + (v !== null)); sum.push(sum.at(-1) + d); squares.push(squares.at(-1) + d * d);
  }
  for (let i = 0; i < y.length; i++) {
    const from = Math.max(0, i - reach), to = Math.min(y.length, i + reach + 1), n = count[to] - count[from];
    if (!n) { mean.push(null); low.push(null); high.push(null); continue; }
    const m = (sum[to] - sum[from]) / n;
    const v = n > 1 ? Math.max(0, squares[to] - squares[from] - n * m * m) / (n - 1) : 0;
    const half = 1.96 * Math.sqrt(v / n);
    mean.push(base + m); low.push(base + m - half); high.push(base + m + half);
  }
  return { mean, low, high };
}
function alpha(hex, a) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${a})`;
}
function seriesOf(chart, hidden) {
  // Tables for uPlot.join, the series, the bands, and the legend entries.
  const axis = axisOf(chart), tables = [], series = [{}], bands = [], legend = [];
  const labels = [...new Set(chart.lines.map((l) => l.label))], many = D.runs.length > 1;
  let total = null;
  const add = (x, y, options) => { tables.push([x, y]); series.push(options); return series.length - 1; };
  chart.lines.forEach((line, place) => {
    const x = line.x.map((i) => D.runs[line.run].steps[chart.about][axis][i]);
    const off = hidden.has(place);
    const stroke = chart.stacked ? partColor(line.label) : many && labels.length === 1 ? color(line.run) : color(labels.indexOf(line.label));
    const dash = many && labels.length > 1 ? RUN_DASH[line.run] : [];
    const name = many ? `${D.runs[line.run].name}${labels.length > 1 ? ` · ${line.label}` : ""}` : line.label;
    const entry = { name, stroke, dash, place, off, box: chart.stacked };
    const marks = x.length < 40 || line.low !== undefined;
    const base = { stroke, dash, width: 1.8, show: !off, spanGaps: true, points: { show: marks, size: 5, fill: stroke } };
    if (chart.stacked) {
      const y = off ? line.y.map(() => 0) : line.y;
      const key = new Map((total || [[], []])[0].map((v, i) => [v, total[1][i]]));
      const xs = total ? total[0] : x;
      const at = new Map(x.map((v, i) => [v, y[i]]));
      const sum = xs.map((v) => (key.get(v) || 0) + (at.get(v) || 0));
      const index = add(xs, sum, { ...base, width: 1, points: { show: false }, fill: total ? undefined : alpha(stroke, 0.75) });
      if (total) bands.push({ series: [index, index - 1], fill: alpha(stroke, 0.75) });
      total = [xs, sum];
      entry.index = index; entry.values = at;
    } else if (line.low) {
      const high = add(x, line.high, { ...base, width: 0, points: { show: false } });
      entry.index = add(x, line.y, base);
      const low = add(x, line.low, { ...base, width: 0, points: { show: false } });
      bands.push({ series: [high, low], fill: alpha(stroke, 0.16) });
    } else {
      const w = chart.smooth ? windowOf(line.y.length) : 1;
      if (w > 1) {
        const s = smoothed(line.y, w), band = chart.id === "reward";
        const high = band ? add(x, s.high, { ...base, width: 0, points: { show: false } }) : null;
        const low = band ? add(x, s.low, { ...base, width: 0, points: { show: false } }) : null;
        if (band) bands.push({ series: [high, low], fill: alpha(stroke, 0.2) });
        add(x, line.y, { ...base, dash: [], width: 1, stroke: alpha(stroke, 0.22), points: { show: false } });
        entry.index = add(x, s.mean, { ...base, width: 2.2, points: { show: false } });
        entry.window = w;
      } else entry.index = add(x, line.y, base);
    }
    legend.push(entry);
  });
  return { axis, data: uPlot.join(tables), series, bands, legend };
}
function zoomOf({ u, axis }) {
  // The visible range of the x axis if the chart is zoomed in, else null.
  const xs = u.data[0], { min, max } = u.scales.x;
  return xs.length && (min > xs[0] || max < xs[xs.length - 1]) ? { axis, min, max } : null;
}
function draw(chart, holder) {
  const old = plots.get(chart.id), before = old ? { hidden: old.hidden, zoom: zoomOf(old) } : kept.get(chart.id);
  const hidden = before ? before.hidden : new Set(), zoom = before ? before.zoom : null;
  const { axis, data, series, bands, legend } = seriesOf(chart, hidden);
  const plot = holder.querySelector(".plot"), keys = holder.querySelector(".legend");
  plot.replaceChildren();
  const names = { step: { rl: "RL step", sft: "SFT step", draft: "training step" }[chart.about], minutes: "minutes", tokens: "tokens" };
  const text = css("--muted"), grid = css("--line");
  const ticks = (u, vals) => vals.map((v) => (v === null ? "" : chart.share ? `${+(100 * v).toFixed(1)} %` : short(v)));
  const plain = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
  const width = Math.max(220, holder.clientWidth - 34);
  const span = (u, min, max) => {
    if (min === null || max === null) return [0, 1];
    let low = chart.zero || chart.stacked || (chart.share && min >= 0 && min < 0.25) ? Math.min(0, min) : min;
    const room = (max - low || Math.abs(max) || 1) * 0.06;
    return [low === 0 && min >= 0 ? 0 : low - room, max + room];
  };
  const u = new uPlot({
    width, height: holder.classList.contains("wide") ? 280 : 230, series, bands, legend: { show: false },
    scales: { x: { time: false }, y: { range: span } },
    axes: [
      { ...plain, label: names[axis], labelSize: 18, labelFont: "12px system-ui, sans-serif", size: 34, values: (u, vals) => vals.map(short) },
      { ...plain, size: 58, values: ticks },
    ],
    cursor: { sync: { key: `${chart.about}-${axis}`, setSeries: false }, points: { size: 6 }, focus: { prox: 20 } },
    hooks: { setCursor: [(me) => values(me.cursor.idx)] },
  }, data, plot);
  const shown = [];
  const values = (index) => {
    for (const { entry, out } of shown) {
      const i = index === null || index === undefined ? lastOf(data[entry.index]) : index;
      const v = chart.stacked ? entry.values.get(data[0][i]) : data[entry.index][i];
      out.textContent = v === null || v === undefined ? "" : chart.share ? `${(100 * v).toFixed(1)} %` : short(v);
    }
  };
  keys.replaceChildren(...legend.map((entry) => {
    const out = el("span", { class: "v" });
    shown.push({ entry, out });
    const mark = el("i", { class: entry.box ? "box" : null });
    if (entry.box) mark.style.background = entry.stroke; else { mark.style.borderTopColor = entry.stroke; if (entry.dash.length) mark.style.borderTopStyle = "dashed"; }
    const title = entry.window ? `mean of ${entry.window} steps; click to hide` : "click to hide";
    return el("button", { class: entry.off ? "off" : null, title, "aria-pressed": String(!entry.off), onclick: () => {
      if (hidden.has(entry.place)) hidden.delete(entry.place); else hidden.add(entry.place);
      draw(chart, holder);
    } }, mark, entry.name, out);
  }));
  values(null);
  if (zoom && zoom.axis === axis) u.setScale("x", { min: zoom.min, max: zoom.max });
  if (old) old.u.destroy();
  plots.set(chart.id, { u, hidden, chart, holder, axis });
}
function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return i;
  return 0;
}
function chartCard(chart) {
  const wide = chart.stacked || ["reward", "accuracy"].includes(chart.id) && D.runs.length > 3;
  const card = el("div", { class: `card chart${wide ? " wide" : ""}`, id: `chart-${chart.id}` },
    el("h3", {}, chart.title), el("div", { class: "unit" }, chart.unit + (chart.stacked && D.runs.length > 1 ? `; ${D.runs[0].name} only` : "")),
    el("div", { class: "legend" }), el("div", { class: "plot" }));
  if (chart.note) card.append(el("p", { class: "note" }, chart.note));
  return card;
}

// --- other cards ---------------------------------------------------------------------------------
const flat = (chart) => chart.lines.every((line) => line.y.every((v) => v === 0));
function zeroCard(charts) {
  // For a metric that is always 0 one line of text is enough.
  return el("div", { class: "card" }, el("h3", {}, "Zero in all steps"), el("table", {}, el("tbody", {}, charts.map((c) => el("tr", { id: `zero-${c.id}` },
    el("td", {}, c.title), el("td", {}, [...new Set(c.lines.map((l) => l.label))].join(", ")))))));
}
function title(run, text) {
  return el("h3", {}, D.runs.length > 1 ? `${text}: ${run.name}` : text);
}
function ledgerCard(run) {
  const ledger = run.ledger;
  if (!ledger) return el("div", { class: "card wide" }, title(run, "Where the time went"), el("p", { class: "note" }, "Unknown: the run has not started, or an older version wrote it."));
  const parts = Object.entries(ledger.parts).filter(([name]) => name !== "not measured");
  const rest = ledger.parts["not measured"];
  const order = parts.map(([name]) => [name, partColor(name), ledger.parts[name]]);
  if (rest > 0) order.push(["not measured", css("--line"), rest]);
  const row = ([name, fill, s]) => {
    const box = el("i", { class: "box" }); box.style.background = fill;
    return el("tr", {}, el("td", {}, box, name), el("td", { class: "n" }, seconds(s)), el("td", { class: "n" }, percent(s / ledger.wall)));
  };
  const bar = el("div", { class: "bar", role: "img", "aria-label": "wall time by part" }, order.map(([name, fill, s]) => {
    const span = el("span", { title: `${name}: ${seconds(s)}, ${percent(s / ledger.wall)}` });
    span.style.background = fill; span.style.width = `${100 * Math.max(0, s) / ledger.wall}%`;
    return span;
  }));
  const half = Math.ceil(order.length / 2);
  return el("div", { class: "card wide", "data-unexplained": ledger.unexplained },
    title(run, `Where the time went: ${seconds(ledger.wall)} of wall time`), bar,
    el("div", { class: "two" }, [order.slice(0, half), order.slice(half)].map((rows) => el("table", {}, el("tbody", {}, rows.map(row))))),
    el("p", { class: "note" }, `Each part is measured independently, except engine idle (the remainder of generation) and rest of the step (the remainder of a step). The parts add up to the wall time within ${percent(ledger.unexplained)}.` + (rest < 0 ? " Some parts overlap." : "")));
}
function ganttCard(run) {
  if (!run.gantt.length) return null;
  const names = [...new Set(run.gantt.map((r) => r[0]))], end = Math.max(...run.gantt.map((r) => r[2]));
  const rows = names.map((name) => {
    const line = el("div", { class: "bar" }); line.style.height = "14px"; line.style.position = "relative"; line.style.margin = "3px 0"; line.style.flex = "1";
    for (const [n, a, b] of run.gantt) if (n === name) {
      const span = el("span", { title: `${name}: ${seconds(a)} to ${seconds(b)}` });
      Object.assign(span.style, { position: "absolute", left: `${100 * a / end}%`, width: `max(2px, ${100 * (b - a) / end}%)`, background: partColor(name) });
      line.append(span);
    }
    const label = el("span", { class: "note" }, name); label.style.width = "150px";
    const row = el("div", {}, label, line); row.style.display = "flex"; row.style.alignItems = "center";
    return row;
  });
  return el("div", { class: "card wide" }, title(run, "Timeline"), rows, el("div", { class: "axis" }, el("span", {}, "start"), el("span", {}, seconds(end))));
}
function lostCard(run) {
  const rows = run.lost.map(([what, count]) => el("tr", {}, el("td", {}, what), el("td", { class: "n" }, count.toLocaleString("en"))));
  return el("div", { class: "card" }, title(run, "Dropped and failed"),
    rows.length ? el("table", {}, el("tbody", {}, rows)) : el("p", { class: "note" }, run.steps.rl.step.length ? "None: no group was dropped, no sample failed or was aborted, vetoed or rejected, and no update was skipped." : "No RL step has been logged."));
}
function plansCard(run) {
  if (!run.plans) return null;
  const { plans, rows } = run.plans, all = rows.map(([, v]) => v.reduce((a, b) => a + b, 0));
  const body = rows.map(([size, values], r) => el("tr", {}, el("th", {}, size), values.map((v) => {
    const share = all[r] ? v / all[r] : 0, cell = el("td", { title: seconds(v) }, share >= 0.005 ? percent(share) : "");
    cell.style.background = `rgba(var(--heat), ${(0.75 * share).toFixed(3)})`;
    return cell;
  }), el("td", {}, seconds(all[r]))));
  return el("div", { class: "card wide" }, title(run, "Draft plans by running requests"),
    el("div", { class: "unit" }, "share of decoding time; a plan is steps_topk_tokens, as in 5_1_6"),
    el("div", { class: "scroll" }, el("table", { class: "heat" }, el("thead", {}, el("tr", {}, el("th", {}, "running"), plans.map((p) => el("th", {}, p)), el("th", {}, "time"))), el("tbody", {}, body))));
}
function histogramCard(run) {
  const steps = Object.keys(run.lengths).map(Number).sort((a, b) => a - b);
  if (!steps.length) return null;
  const most = Math.max(...steps.flatMap((s) => run.lengths[s])), bins = 24, width = Math.max(1, most / bins);
  const counts = steps.map((s) => { const c = new Array(bins).fill(0); for (const n of run.lengths[s]) c[Math.min(bins - 1, Math.floor(n / width))] += 1 / run.lengths[s].length; return c; });
  const top = Math.max(...counts.flat());
  const bars = Array.from({ length: bins }, (_, b) => el("div", { title: `${Math.round(b * width)} to ${Math.round((b + 1) * width)} tokens` }, counts.map((c, i) => {
    const span = el("span"); span.style.height = `${100 * c[b] / top}%`; span.style.background = color(i); return span;
  })));
  const keys = el("div", { class: "legend" }, steps.map((s, i) => { const m = el("i", { class: "box" }); m.style.background = color(i); return el("span", {}, m, ` step ${s} (${run.lengths[s].length} responses)`); }));
  return el("div", { class: "card" }, title(run, "Response length distribution"), el("div", { class: "unit" }, "share of responses, by tokens"), keys, el("div", { class: "hist" }, bars), el("div", { class: "axis" }, el("span", {}, "0"), el("span", {}, `${most} tokens`)));
}
function sampleCard(run, sample) {
  const picked = el("div", { class: "picked" }, "Hover over or tap a token to see its log-prob.");
  const text = el("div", { class: "text", tabindex: "0" });
  sample.pieces.forEach((piece, i) => {
    const drafted = sample.drafted[i] === "1", masked = sample.masked[i] === "1";
    if (sample.labels[i]) text.append(el("b", { class: "part" }, sample.labels[i]));
    text.append(el("span", { "data-i": i, class: masked ? "m" : drafted ? "d" : null }, piece));
  });
  const tell = (event) => {
    const i = event.target.dataset ? event.target.dataset.i : undefined;
    if (i === undefined) return;
    for (const on of text.querySelectorAll(".on")) on.classList.remove("on");
    event.target.classList.add("on");
    const p = sample.log_probs[i];
    const place = sample.gap !== null && +i > sample.gap ? sample.tokens - sample.pieces.length + +i + 1 : +i + 1;
    picked.textContent = `token ${place}: ${JSON.stringify(sample.pieces[i])}, ` + (sample.masked[i] === "1" ? "not sampled by the policy" : `log-prob ${p === null ? "not finite" : p} (probability ${p === null ? "–" : percent(Math.exp(p))})` + (sample.drafted[i] === "1" ? ", drafted and accepted" : ""));
  };
  text.addEventListener("mouseover", tell); text.addEventListener("click", tell);
  const drafted = sample.of_drafts, n = sample.tokens;
  const meta = el("div", { class: "meta" }, D.runs.length > 1 ? el("span", {}, run.name) : null, el("span", {}, "step ", el("b", {}, String(sample.step))),
    el("span", {}, "reward ", el("b", {}, sample.failure ? "failed" : short(sample.score))), el("span", {}, `${n} tokens`),
    el("span", {}, n ? `${percent(drafted / n)} drafted` : ""), el("span", {}, sample.stop_reason ? `ended by ${sample.stop_reason.replace("_", " ")}` : sample.status),
    sample.gts ? el("span", {}, `ground truth ${sample.gts.slice(0, 80)}`) : null);
  return el("div", { class: "card sample" }, meta, el("div", { class: "text prompt" }, sample.input), text, picked, sample.failure ? el("p", { class: "note" }, sample.failure) : null);
}
function runCard(run) {
  const facts = Object.entries(run.environment).map(([k, v]) => el("tr", {}, el("th", {}, k), el("td", {}, v)));
  const processes = run.processes.map(([begin, s, how, line]) => el("tr", {}, el("td", {}, new Date(1000 * begin).toLocaleString()), el("td", {}, seconds(s)), el("td", {}, how), el("td", {}, line)));
  return el("div", { class: "card wide" }, title(run, "Environment"), el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, facts))),
    processes.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["started", "duration", "status", "command"].map((h) => el("th", {}, h)))), el("tbody", {}, processes))) : null,
    el("details", {}, el("summary", {}, "Configuration"), el("pre", {}, run.config || "none")));
}
function differencesCard() {
  if (!D.differences.length) return null;
  return el("div", { class: "card wide" }, el("h3", {}, "Settings that differ between the runs"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "key"), D.runs.map((r) => el("th", {}, r.name)))),
    el("tbody", {}, D.differences.map((row) => el("tr", {}, row.map((v) => el("td", {}, v))))))));
}

// --- the page ------------------------------------------------------------------------------------
function renderHead() {
  const head = document.getElementById("top");
  head.replaceChildren(...D.runs.map((run) => {
    const kind = ["running", "finished"].includes(run.state) ? run.state : ["interrupted", "ended"].includes(run.state) ? "" : "bad";
    return el("div", {}, el("div", { class: "head" }, el("h1", {}, run.name), el("span", { class: `state ${kind}` }, run.state)),
      run.notes.length ? el("div", { class: "card warn" }, run.notes.map((n) => el("div", {}, n))) : null,
      el("div", { class: "tiles" }, run.tiles.map(([label, value, note]) => el("div", { class: "card tile" }, el("span", {}, label), el("b", {}, value), el("span", {}, note)))));
  }));
}
function extras(id) {
  const of = (make) => D.runs.map(make).filter((c) => c);
  return {
    time: () => [...of(ledgerCard), ...of(ganttCard)], lengths: () => of(histogramCard), speculation: () => of(plansCard),
    failures: () => of(lostCard), run: () => [differencesCard(), ...of(runCard)].filter((c) => c),
  }[id]?.() || [];
}
function samples() {
  const cards = D.runs.flatMap((run) => run.samples.slice().reverse().map((s) => sampleCard(run, s)));
  return cards.length ? [el("p", { class: "note" }, "Tokens with this background ", el("span", { class: "key d" }, "were drafted"), " and accepted: the policy sampled the same token at that position."), ...cards] : [];
}
const nameOf = (details) => `${details.closest(".card")?.querySelector("h3")?.textContent} / ${details.querySelector("summary").textContent}`;
function render() {
  const y = scrollY, main = document.getElementById("main"), nav = document.getElementById("nav");
  for (const [id, p] of plots) { kept.set(id, { hidden: p.hidden, zoom: zoomOf(p) }); p.u.destroy(); }
  plots.clear();
  const open = new Set([...document.querySelectorAll("#main details[open]")].map(nameOf));
  renderHead();
  const present = [], bodies = [];
  for (const [id, name] of SECTIONS) {
    const all = D.charts.filter((c) => c.section === id), cards = id === "samples" ? samples() : extras(id);
    if (!all.length && !cards.length) continue;
    const charts = all.filter((c) => !flat(c)), zero = all.filter(flat);
    if (zero.length) cards.push(zeroCard(zero));
    present.push([id, name]);
    const grid = el("div", { class: id === "samples" ? "" : "grid" }, ...cards.filter((c) => c.classList.contains("wide")), ...charts.map(chartCard), ...cards.filter((c) => !c.classList.contains("wide")));
    bodies.push(el("section", { "aria-labelledby": id }, el("h2", { id }, name), grid));
  }
  if (!D.charts.length) bodies.unshift(el("p", { class: "note" }, "Nothing has been logged yet."));
  main.replaceChildren(...bodies);
  const select = (label, key, options) => el("label", {}, label, " ", el("select", { "aria-label": label, onchange: (e) => { view[key] = e.target.value; for (const p of [...plots.values()]) draw(p.chart, p.holder); } },
    options.map(([value, text]) => el("option", { value, selected: view[key] === value }, text))));
  nav.replaceChildren(...present.map(([id, name]) => el("a", { href: `#${id}` }, name)), el("span", { class: "grow" }),
    select("over", "x", [["step", "steps"], ["minutes", "minutes"], ["tokens", "tokens"]]),
    select("smooth", "smooth", [["auto", "auto"], ["1", "off"], ["5", "5"], ["15", "15"], ["51", "51"]]),
    el("button", { onclick: setTheme, "aria-label": "light or dark" }, document.documentElement.dataset.theme === "dark" ? "Light" : "Dark"));
  for (const chart of D.charts) if (!flat(chart)) draw(chart, document.getElementById(`chart-${chart.id}`));
  for (const details of document.querySelectorAll("#main details")) if (open.has(nameOf(details))) details.open = true;
  document.getElementById("foot").textContent = `Slipstream ${D.version}${LIVE ? ", live" : `, ${new Date(1000 * D.made).toLocaleString()}`}. Drag over a chart to zoom, double-click to zoom out, click a name to hide its line.`;
  scrollTo(0, y);
  document.documentElement.dataset.ready = "true";
}
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { for (const p of plots.values()) p.u.setSize({ width: Math.max(220, p.holder.clientWidth - 34), height: p.u.height }); }, 120); });
applyTheme();
render();
if (LIVE) {
  let stamp = null;
  const ask = async () => {
    try {
      const answer = await fetch(`data.json?have=${stamp ?? ""}`);
      if (answer.status === 200) { stamp = answer.headers.get("ETag"); D = await answer.json(); render(); }
      document.body.classList.remove("lost");
    } catch (error) {
      document.getElementById("foot").textContent = "The server does not respond; the data may be outdated. Restart `slipstream watch`.";
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
}
