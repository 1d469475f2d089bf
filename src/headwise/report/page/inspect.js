"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const layers = data.layers;
const measured = layers.map((layer, i) => i).filter((i) => layers[i].values.head_damage);
const state = { layer: measured[0] ?? 0, head: 0, quantity: "qk_data_dims", place: 0 };

// ---------------------------------------------------------------- numbers and colours
const SHARES = ["90 %", "95 %", "99 %"], TOLERANCES = ["0.1", "0.01", "0.001"];
const percent = (x) => (100 * x).toFixed(Math.abs(x) < 0.0995 ? 1 : 0) + " %";
const plain = (x) => x === null || x === undefined ? "–" : x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? (+x.toPrecision(2)).toExponential().replace("e+", "e") : String(+x.toPrecision(3));
const grouped = (x) => x.toLocaleString("en-US");
function size(bytes) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (bytes >= unit) return +(bytes / unit).toPrecision(4) + " " + name;
  return bytes + " B";
}
const RAMP = [[0, 34, 78], [33, 61, 109], [85, 91, 109], [123, 122, 119], [165, 156, 116], [211, 193, 100], [254, 232, 56]]; // cividis
function colour(t) {
  const x = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(x), RAMP.length - 2), f = x - i;
  return "rgb(" + RAMP[i].map((c, k) => Math.round(c + f * (RAMP[i + 1][k] - c))).join(",") + ")";
}
function unpack(text) {
  return Array.from(atob(text), (c) => 10 ** (-c.charCodeAt(0) * data.decades / 255));
}

// ---------------------------------------------------------------- drawing
const SVG = "http://www.w3.org/2000/svg";
function draw(parent, name, attributes = {}, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}
function canvas(id, width, height, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  $(id).replaceChildren(svg);
  return svg;
}
function ticks(low, high, log) {
  if (log) {
    const decades = Math.log10(high / low), steps = decades < 2.5 ? [1, 2, 5] : [1], all = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) for (const m of steps) all.push(m * 10 ** e);
    const fitting = all.filter((x) => x >= low * 0.999 && x <= high * 1.001);
    return fitting.filter((x, i) => fitting.length < 8 || i % 2 === 0);
  }
  const step = [1, 2, 5, 10].map((m) => m * 10 ** Math.floor(Math.log10((high - low) / 4 || 1))).find((s) => (high - low) / s <= 6);
  const all = [];
  for (let x = Math.ceil(low / step) * step; x <= high + 1e-9; x += step) all.push(+x.toPrecision(6));
  return all;
}
/** Lines in one plot. series: {name, points: [[x, y]], colour, dash, width}; marks on x come from xTicks. */
function plot(id, { label, series, xLabel, yLabel, xLog, yLog, xTicks, yRange, width = 520, height = 300 }) {
  const W = width, H = height, left = 58, right = 24, top = 12, bottom = 64;
  const svg = canvas(id, W, H, label);
  const points = series.flatMap((s) => s.points).filter(([, y]) => y !== null && (!yLog || y > 0));
  if (!points.length) { draw(svg, "text", { x: left, y: H / 2 }, "not measured"); return; }
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = yRange || [Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) [x0, x1] = xLog ? [x0 / 2, x1 * 2] : [x0 - 0.5, x1 + 0.5];
  if (y0 === y1) [y0, y1] = yLog ? [y0 / 2, y1 * 2] : [y0 - 0.5, y1 + 0.5];
  if (!yLog && !yRange) y0 = Math.min(0, y0);
  const map = (v, a, b, log) => log ? (Math.log(v) - Math.log(a)) / (Math.log(b) - Math.log(a)) : (v - a) / (b - a);
  const X = (x) => left + map(x, x0, x1, xLog) * (W - left - right), Y = (y) => H - bottom - map(y, y0, y1, yLog) * (H - bottom - top);
  for (const y of ticks(y0, y1, yLog)) {
    draw(svg, "line", { x1: left, x2: W - right, y1: Y(y), y2: Y(y), class: "grid" });
    draw(svg, "text", { x: left - 6, y: Y(y) + 4, "text-anchor": "end" }, plain(y));
  }
  for (const x of xTicks || ticks(x0, x1, xLog)) draw(svg, "text", { x: X(x), y: H - bottom + 16, "text-anchor": "middle" }, grouped(x));
  draw(svg, "line", { x1: left, x2: W - right, y1: H - bottom, y2: H - bottom, class: "axis" });
  draw(svg, "text", { x: (left + W - right) / 2, y: H - bottom + 32, "text-anchor": "middle" }, xLabel);
  draw(svg, "text", { x: 12, y: (H - bottom + top) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(H - bottom + top) / 2})` }, yLabel);
  let legend = left;
  for (const s of series) {
    const inside = s.points.filter(([, y]) => y !== null && (!yLog || y > 0)).map(([x, y]) => [X(x), Math.min(Y(Math.max(y, y0)), H - bottom)]);
    if (!inside.length) continue;
    const style = { fill: "none", stroke: `var(--${s.colour})`, "stroke-width": s.width || 2, "stroke-dasharray": s.dash || "none" };
    draw(svg, "polyline", { points: inside.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), ...style });
    if (inside.length < 12 && !s.dash) for (const [x, y] of inside) draw(svg, "circle", { cx: x, cy: y, r: 3, fill: `var(--${s.colour})` });
    draw(svg, "line", { x1: legend, x2: legend + 18, y1: H - 12, y2: H - 12, ...style });
    const name = draw(svg, "text", { x: legend + 22, y: H - 8 }, s.name);
    legend += 22 + name.getComputedTextLength() + 14;
  }
}

// ---------------------------------------------------------------- heat map
const NAMES = {
  qk_data_dims: "Query/key dimensions used on the text", qk_weight_dims: "Query/key dimensions by weights alone",
  vo_data_dims: "Value dimensions used on the text", vo_weight_dims: "Value dimensions by weights alone",
  jacobian_mean: "Softmax Jacobian norm", jacobian_p95: "Softmax Jacobian norm, 95th percentile", jacobian_exponent: "Exponent of the Jacobian norm in length",
  logit_spread: "Spread of logits", hard_rank: "Hard rank", effective_rank: "Effective rank", numerical_rank: "Numerical rank", stable_rank: "Stable rank",
  entropy: "Entropy of attention (nats)", first_token: "Share on the first token", twin_overlap: "Overlap with the nearest head",
  cut_rows: "Attention moved when queries and keys are cut", cut_output: "Output error when queries and keys are cut", vo_cut_output: "Output error when values are cut",
  head_damage: "Predicted loss increase of removing the head (nats)",
};
const CUTS = ["a quarter of the width", "half the width", "three quarters of the width"];
const BY_LENGTH = new Set(["jacobian_mean", "jacobian_p95", "logit_spread", "hard_rank", "effective_rank", "stable_rank", "entropy", "first_token"]);
const lengths = [...new Set(layers.flatMap((layer) => layer.lengths))].sort((a, b) => a - b);
function places(name) {
  if (name.endsWith("_dims")) return SHARES.map((s) => s + " of the energy");
  if (BY_LENGTH.has(name)) return lengths.map((n) => grouped(n) + " tokens");
  if (name === "numerical_rank") return lengths.flatMap((n) => TOLERANCES.map((t) => `${grouped(n)} tokens, tolerance ${t}`));
  return name.includes("cut_") ? CUTS.slice(0, layers[measured[0]].values[name]?.[0].length) : [];
}
function lookup(layer, name, head, place) {
  const value = layer.values[name]?.[head];
  if (value === undefined) return null;
  if (!Array.isArray(value)) return value;
  if (name === "numerical_rank") { const at = layer.lengths.indexOf(lengths[Math.floor(place / 3)]); return value[at]?.[place % 3] ?? null; }
  if (BY_LENGTH.has(name)) return value[layer.lengths.indexOf(lengths[place])] ?? null;
  return value[place] ?? null;
}
const SCALED_BY_LOG = new Set(["head_damage", "stable_rank"]);
function drawMap() {
  const heads = Math.max(...layers.map((layer) => layer.heads)), cell = Math.max(14, Math.min(30, 960 / layers.length, 640 / heads));
  const left = 44, top = 6, W = left + layers.length * cell + 4, H = top + heads * cell + 40;
  const svg = canvas("map", Math.max(W, 1040), H, NAMES[state.quantity]);
  const values = layers.map((layer) => Array.from({ length: layer.heads }, (_, h) => lookup(layer, state.quantity, h, state.place)));
  const flat = values.flat().filter((v) => v !== null), log = SCALED_BY_LOG.has(state.quantity);
  if (!flat.length) flat.push(0);
  const low = Math.min(...flat), high = Math.max(...flat), floor = log ? Math.max(low, high * 1e-6) : low;
  const level = (v) => high === low ? 0.5 : log ? (Math.log(Math.max(v, floor)) - Math.log(floor)) / (Math.log(high) - Math.log(floor) || 1) : (v - low) / (high - low);
  values.forEach((column, l) => column.forEach((value, h) => {
    const box = draw(svg, "rect", { x: left + l * cell, y: top + h * cell, width: cell - 1, height: cell - 1, rx: 2, "data-layer": l, "data-head": h,
      fill: value === null ? "var(--grid)" : colour(level(value)) });
    draw(box, "title", {}, `layer ${l}, head ${h}: ${plain(value)}`);
  }));
  const stride = Math.ceil(40 / cell);
  for (let l = 0; l < layers.length; l += stride) draw(svg, "text", { x: left + (l + 0.5) * cell, y: top + heads * cell + 16, "text-anchor": "middle" }, l);
  for (let h = 0; h < heads; h += Math.ceil(16 / cell)) draw(svg, "text", { x: left - 6, y: top + (h + 0.5) * cell + 4, "text-anchor": "end" }, h);
  draw(svg, "text", { x: left + layers.length * cell / 2, y: H - 4, "text-anchor": "middle" }, "layer");
  draw(svg, "text", { x: 10, y: top + heads * cell / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${top + heads * cell / 2})` }, "head");
  draw(svg, "rect", { x: left + state.layer * cell - 1.5, y: top + state.head * cell - 1.5, width: cell + 2, height: cell + 2, rx: 3, class: "frame" });
  $("low").textContent = plain(log ? floor : low); $("high").textContent = plain(high);
  $("ramp").style.background = `linear-gradient(90deg, ${RAMP.map((c) => `rgb(${c})`).join(",")})`;
  $("definition").textContent = data.definitions[state.quantity];
  const value = lookup(layers[state.layer], state.quantity, state.head, state.place);
  $("where").textContent = `Layer ${state.layer}, head ${state.head}: ${plain(value)}. Click a cell or use the arrow keys.`;
}
function choose(layer, head) {
  const way = Math.sign(layer - state.layer);
  while (way && layers[layer] && !layers[layer].values.head_damage) layer += way; // past layers without attention
  if (!layers[layer]?.values.head_damage) return;
  state.layer = layer;
  state.head = Math.min(Math.max(head, 0), layers[layer].heads - 1);
  drawMap(); drawHead();
}
function chooseQuantity(name) {
  state.quantity = name;
  const names = places(name);
  $("place").replaceChildren(...names.map((text, i) => new Option(text, i)));
  $("place-label").hidden = !names.length;
  state.place = name === "numerical_rank" ? names.length - 2 : BY_LENGTH.has(name) ? names.length - 1 : 0;
  $("place").value = String(state.place);
  drawMap();
}

// ---------------------------------------------------------------- one head
function drawHead() {
  const layer = layers[state.layer], v = layer.values, h = state.head, values = (name) => unpack(v[name][h]).map((y, i) => [i + 1, y]);
  $("head-title").textContent = `Layer ${state.layer}, head ${h}` + (layer.kv_heads < layer.heads ? ` (key/value head ${Math.floor(h * layer.kv_heads / layer.heads)})` : "");
  for (const kind of ["qk", "vo"])
    plot(kind, { label: kind === "qk" ? "Query-key spectrum" : "Value-output spectrum", xLabel: "dimension", yLabel: "singular value / largest", yLog: true, yRange: [1e-4, 1], series: [
      { name: `weights alone: ${v[kind + "_weight_dims"][h][0]} hold 90 %`, points: values(kind + "_weight_spectrum"), colour: "orange", dash: "6 4" },
      { name: `on the text: ${v[kind + "_data_dims"][h][0]}`, points: values(kind + "_data_spectrum"), colour: "blue" }] });
  const group = Math.floor(h * layer.kv_heads / layer.heads), energies = v.rope_pair_energy?.[group];
  $("pairs-figure").hidden = !energies;
  if (energies) plot("pairs", { label: "Energy by RoPE pair", xLabel: "RoPE pair, fastest first", yLabel: "logit (root mean square)", width: 1040, height: 260, series: [
    { name: `whole pairs for 90 / 95 / 99 %: ${v.rope_pair_dims[group].join(" / ")} dimensions`, points: energies.map((y, p) => [p, y]), colour: "blue" }] });
  const at = (name) => layer.lengths.map((n, i) => [n, v[name]?.[h]?.[i] ?? null]);
  const norms = at("jacobian_mean"), median = layer.lengths.map((n, i) => [n, middle(v.jacobian_mean.map((row) => row[i]))]);
  plot("jacobian", { label: "Jacobian norm against length", xLabel: "tokens", yLabel: "norm", xLog: true, yLog: true, xTicks: layer.lengths, series: [
    { name: "this head", points: norms, colour: "blue" }, { name: "95th percentile", points: at("jacobian_p95"), colour: "purple", width: 1 },
    { name: "median of layer", points: median, colour: "green", width: 1 },
    { name: "1/L", points: norms.map(([n]) => [n, norms[0][1] * norms[0][0] / n]), colour: "orange", dash: "6 4" }] });
  const limit = layer.causal ? 0.5 : 0.632;
  plot("rank", { label: "Rank against length", xLabel: "tokens", yLabel: "rank", xLog: true, yLog: true, xTicks: layer.lengths, series: [
    { name: "hard", points: at("hard_rank"), colour: "blue" }, { name: "effective", points: at("effective_rank"), colour: "green" },
    { name: "numerical, 0.01", points: layer.lengths.map((n, i) => [n, v.numerical_rank?.[h]?.[i]?.[1] ?? null]), colour: "purple" },
    { name: `${layer.causal ? "0.5" : "0.63"} n`, points: layer.lengths.map((n) => [n, limit * n]), colour: "orange", dash: "6 4" }] });
  const last = layer.lengths.length - 1, longest = grouped(layer.lengths[last]) + " tokens", rows = [
    ["Query/key dimensions for 90 / 95 / 99 %", v.qk_data_dims[h].join(" / ") + ` of ${layer.qk_dim} on the text, ${v.qk_weight_dims[h].join(" / ")} by weights`],
    ["Value dimensions for 90 / 95 / 99 %", v.vo_data_dims[h].join(" / ") + ` of ${layer.v_dim} on the text, ${v.vo_weight_dims[h].join(" / ")} by weights`],
    [`Jacobian norm at ${longest}`, plain(v.jacobian_mean[h][last]) + (v.jacobian_exponent ? `, falls like length to the power ${plain(v.jacobian_exponent[h])}` : "")],
    [`Entropy, spread of logits at ${longest}`, `${plain(v.entropy[h][last])} nats, ${plain(v.logit_spread[h][last])}`],
    ["On the first token", percent(v.first_token[h][last])],
    ["Nearest head", `head ${v.twin[h]}, ${percent(v.twin_overlap[h])} of the attention shared`],
    ["Attention moved / output error when queries and keys are cut", (v.cut_rows?.[h] || []).map((x, i) => `${layer.widths[i]} dims: ${percent(x)} / ${percent(v.cut_output[h][i])}`).join(" · ") || "–"],
    ["Output error when values are cut", (v.vo_cut_output?.[h] || []).map((x, i) => `${layer.v_widths[i]} dims: ${percent(x)}`).join(" · ") || "–"],
    ["Predicted loss increase of removing it", plain(v.head_damage[h]) + " nats"]];
  $("numbers").tBodies[0].replaceChildren(...rows.map(([name, text]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
    head.scope = "row"; head.textContent = name; cell.textContent = text; row.append(head, cell);
    return row;
  }));
}
const middle = (values) => { const v = values.filter((x) => x !== null).sort((a, b) => a - b); return v.length ? (v[(v.length - 1) >> 1] + v[v.length >> 1]) / 2 : null; };

function drawCondition() {
  const longest = (name) => measured.map((i) => [i, layers[i].values[name][layers[i].values.conditioning.findLastIndex((x) => x !== null)] ?? null]);
  plot("condition", { label: "Condition number by layer", xLabel: "layer", yLabel: "condition number", yLog: true, width: 1040, series: [
    { name: "measured", points: longest("conditioning"), colour: "blue" }, { name: "independent Gaussian heads", points: longest("conditioning_gaussian"), colour: "orange", dash: "6 4" }] });
  $("condition-hint").textContent = data.definitions.conditioning;
}

// ---------------------------------------------------------------- the budget: choices that headwise computed beforehand
const kv = data.budget.kind === "keep_kv";
/** Heads and widths of what each layer caches: of latent attention one shared key, and the latent in the place of values. */
const stored = layers.map((layer) => (layer.latent ? { ...layer, kv_heads: 1, qk_dim: layer.latent.rope_dim, v_dim: layer.latent.kv_rank } : layer));
const sliding = data.budget.tables.length ? data.budget.tables : data.budget.rounded;
/** Tokens a layer's cache holds: all, those in its window, or those of the source of a cross attention. */
function cached(layer, context) {
  if (layer.cache === "none") return 0;
  if (layer.cache === "source") return data.source_tokens;
  return layer.window ? Math.min(context, layer.window - 1) : context;
}
function rounding() { return data.budget.rounded.length > 0 && $("rounded").checked; }
function choices() {
  const tables = rounding() ? data.budget.rounded : data.budget.tables;
  return tables[tables.length > 1 ? $("context").selectedIndex : 0];
}
function drawBudget() {
  const table = choices(), context = Number($("context").value), batch = Number($("batch").value);
  $("keep").min = String(table[0].share);
  const choice = table.find((one) => one.share === Number($("keep").value)) ?? table[0], share = choice.share / 100;
  const chosen = choice.layers.map(([groups, qk, v, bytes, phrase, once, each]) => ({ groups, qk, v, bytes, phrase: data.budget.phrases[phrase], once: once + batch * each }));
  $("keep-value").textContent = percent(choice.kept);
  $("keep").setAttribute("aria-valuetext", `${percent(choice.kept)}, predicted loss increase ${plain(choice.loss)} nats`);
  const loss = choice.expected ?? choice.loss, means = kv ? `perplexity × ${Math.exp(loss).toFixed(3)}` : "per output";
  $("loss").innerHTML = `${plain(choice.loss)} nats <small>${choice.expected === null ? means : `expect about ${plain(choice.expected)}, ${means}`}</small>`;
  for (const kind of ["qk", "v"]) {
    const before = stored.reduce((sum, layer) => sum + layer.kv_heads * layer[kind + "_dim"], 0);
    $("kept-" + kind).textContent = percent(chosen.reduce((sum, layer) => sum + layer.groups * layer[kind], 0) / (before || 1));
  }
  const bytes = (each) => stored.reduce((sum, layer, l) => sum + batch * each(l, layer) * cached(layer, context), 0);
  const now = bytes((l) => chosen[l].bytes) + chosen.reduce((sum, layer) => sum + layer.once, 0);
  if (kv) $("bytes").innerHTML = `${size(now)} <small>of ${size(bytes((l, layer) => 2 * layer.kv_heads * (layer.qk_dim + layer.v_dim)))}</small>`;
  const windows = sliding.length > 1 ? ` --cache-tokens ${context}` : "";
  $("command").textContent = `headwise plan profile.json ${kv ? `--keep-kv ${share}${windows}${rounding() ? "" : " --cache none"}` : `--keep-attention-params ${share}`} -o plan.json`;
  drawWidths(chosen);
}
/** A bar is as high as the width of a head and as wide as the share of key/value heads that stay. */
function drawWidths(chosen) {
  const W = 1040, H = 190, left = 44, top = 10, half = 70, cell = Math.min(40, (W - left - 8) / layers.length);
  const svg = canvas("widths", W, H, "Kept widths by layer: query/key above, values below");
  const most = Math.max(...stored.map((layer) => Math.max(layer.qk_dim, layer.v_dim)), 1);
  [["qk", "qk_dim", 0, "blue", "query/key"], ["v", "v_dim", half + 12, "green", "value"]].forEach(([kind, full, shift, colour, name]) => {
    stored.forEach((layer, l) => {
      const { groups, phrase, bytes, qk, v, [kind]: width } = chosen[l], bits = rounding() ? 8 * bytes / (groups * (qk + v) || 1) : 16, x = left + l * cell, base = top + shift + half;
      const tall = half * layer[full] / most, kept = half * width / most * bits / 16, wide = (cell - 2) * (layer.kv_heads ? groups / layer.kv_heads : 0);
      const box = draw(svg, "rect", { x, y: base - tall, width: cell - 2, height: tall, fill: "var(--grid)" });
      const bar = draw(svg, "rect", { x, y: base - kept, width: wide, height: kept, fill: `var(--${colour})`, "data-kind": kind, "data-width": width, "data-groups": groups });
      const heads = groups === layer.kv_heads ? "" : `, ${groups}/${layer.kv_heads} groups`;
      for (const part of [box, bar]) draw(part, "title", {}, groups ? `layer ${l}: ${name} ${width} of ${layer[full]}${heads}${phrase && ` (${phrase})`}` : `layer ${l}: ${phrase || "no attention"}`);
      const inside = kept > 16 && wide > 18;
      if (cell >= 22) draw(svg, "text", { x: x + (inside ? wide : cell - 2) / 2, y: inside ? base - kept + 13 : base - kept - 3, "text-anchor": "middle", class: inside ? "inside" : "" }, !groups ? "–" : rounding() ? bits.toFixed(1) : width);
    });
    const y = top + shift + half / 2;
    draw(svg, "text", { x: 14, y, "text-anchor": "middle", transform: `rotate(-90 14 ${y})` }, name);
  });
  const stride = Math.ceil(34 / cell);
  for (let l = 0; l < layers.length; l += stride) draw(svg, "text", { x: left + (l + 0.5) * cell - 1, y: top + 2 * half + 28, "text-anchor": "middle" }, l);
}

// ---------------------------------------------------------------- start
const shown = layers[measured[0] ?? 0];
$("facts").textContent = `${data.model.source} · ${data.model.class} · ${grouped(data.model.parameters)} parameters · ${layers.length} layers, width ${data.model.width}` +
  (measured.length ? ` · ${shown.heads} query / ${shown.kv_heads} key-value heads of ${shown.qk_dim} / ${shown.v_dim}` : "") +
  ` · measured on ${grouped(data.text.tokens)} tokens of ${data.text.name}` + data.notes.map((note) => ` · ${note}`).join("");
$("made").textContent = `Made by headwise ${data.versions.headwise} with torch ${data.versions.torch} and transformers ${data.versions.transformers}, seed ${data.seed}. Every definition and number is in profile.json.`;
if (measured.length) {
  const names = Object.keys(NAMES).filter((name) => measured.some((i) => layers[i].values[name]));
  $("quantity").replaceChildren(...names.map((name) => new Option(NAMES[name], name)));
  $("quantity").addEventListener("change", (event) => chooseQuantity(event.target.value));
  $("place").addEventListener("change", (event) => { state.place = Number(event.target.value); drawMap(); });
  $("map").addEventListener("click", (event) => { const box = event.target.closest("[data-head]"); if (box) choose(Number(box.dataset.layer), Number(box.dataset.head)); });
  $("map").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) { event.preventDefault(); choose(state.layer + move[0], state.head + move[1]); }
  });
  chooseQuantity(state.quantity); drawHead(); drawCondition();
}
if (sliding.length) {
  $("context").replaceChildren(...data.budget.contexts.map((n) => new Option(grouped(n), n)));
  $("context").value = String(data.budget.contexts.slice(-1)[0]);
  if (!kv) {
    $("budget-of").textContent = "attention parameters";
    for (const id of ["bytes", "context", "batch"]) $(id).parentElement.hidden = true;
  }
  $("rounded").parentElement.hidden = !data.budget.rounded.length || !data.budget.tables.length;
  if (data.budget.rounded.length) $("keep").value = "25";
  for (const id of ["keep", "context", "batch", "rounded"]) $(id).addEventListener("input", drawBudget);
  $("copy").addEventListener("click", async () => {
    const text = $("command").textContent;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.createElement("textarea");
      area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
    $("copy").textContent = "Copied"; setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
  });
  drawBudget();
} else {
  const why = document.createElement("p");
  why.textContent = "Nothing here can be cut: the attention was removed, or is latent (MLA) and was measured by a version that could not round it.";
  $("budget").replaceChildren(why);
}
