"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const facts = JSON.parse($("facts").textContent);
  const live = facts.answer === null;
  const form = $("form");
  let answer = null, running = null, file = "plan.json", planText = null;

  /* ---- numbers ---- */
  const short = (x, digits = 4) => {
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e7 || size < 1e-4) return x.toExponential(Math.max(digits - 2, 0)).replace("e+", "e").replace(/\.?0+e/, "e");
    return Number(x.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
  };
  const plain = (x) => {
    const size = Math.abs(x);
    return size !== 0 && size < 1e-3 ? x.toExponential().replace("e+", "e") : String(x);
  };
  const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)}%`;
  const rounded = (x, digits) => Number(x.toPrecision(digits));

  /* ---- the form: a box and a slider for each number, rounded buttons for each choice ---- */
  const rows = {};
  const scales = {
    log: { at: (v, a, b) => Math.log(v / a) / Math.log(b / a), value: (s, a, b) => a * (b / a) ** s },
    linear: { at: (v, a, b) => (v - a) / (b - a), value: (s, a, b) => a + s * (b - a) },
    gamma: { at: (v, a, b) => Math.log(1 / (1 - v) / a) / Math.log(b / a), value: (s, a, b) => 1 - 1 / (a * (b / a) ** s) },
  };
  for (const row of document.querySelectorAll(".row[data-name]")) {
    const { name, scale, from, to, digits } = row.dataset;
    const whole = "whole" in row.dataset, kind = scales[scale];
    const [least, most] = facts.limits[name];
    const box = Object.assign(document.createElement("input"), { type: "number", id: name, min: least, max: most, step: "any", inputMode: "decimal" });
    const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 200, step: 1 });
    slider.setAttribute("aria-label", `${row.querySelector("label").textContent.trim()}, slider`);
    row.querySelector("label").after(box, slider);
    const follow = (moved = false) => {  // a slider that moved stays where it is: the box holds a rounded number
      const at = Math.min(Math.max(kind.at(Number(box.value), Number(from), Number(to)), 0), 1);
      if (!moved) slider.value = Number.isFinite(at) ? Math.round(200 * at) : 0;
      slider.style.setProperty("--at", `${slider.value / 2}%`);
      slider.setAttribute("aria-valuetext", box.value);
    };
    box.addEventListener("input", () => { follow(); changed(); });
    slider.addEventListener("input", () => {
      let value = kind.value(slider.value / 200, Number(from), Number(to));
      value = scale === "gamma" ? 1 - rounded(1 - value, 2) : rounded(value, Number(digits || 2));
      if (scale === "gamma") value = rounded(value, 6);
      if (whole) value = Math.round(value);
      box.value = plain(Math.min(Math.max(value, least), most));
      follow(true);
      changed();
    });
    rows[name] = { box, slider, follow, whole };
  }
  const words = {
    "add-remove": "add or remove one", "replace-one": "replace one",
    gamma: "γ", kappa: "κ", spectrum: "spectrum", nothing: "nothing", joint: "planned too",
  };
  for (const group of document.querySelectorAll(".pick")) {
    const { name } = group.dataset;
    group.setAttribute("role", "radiogroup");
    group.setAttribute("aria-labelledby", `l-${name}`);
    for (const value of facts.choices[name]) {
      const label = document.createElement("label");
      const input = Object.assign(document.createElement("input"), { type: "radio", name, value });
      label.append(input, words[value] || value);
      group.append(label);
      input.addEventListener("change", changed);
    }
  }
  $("spectrum").addEventListener("input", changed);
  $("auto").addEventListener("change", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => { event.preventDefault(); fill(facts.start); changed(); });

  const choice = (name) => form.querySelector(`input[name="${name}"]:checked`).value;
  function fill(settings) {
    for (const [name, row] of Object.entries(rows)) {
      if (name === "steps" && settings.steps === "auto") continue;
      row.box.value = plain(settings[name]);
      row.follow();
    }
    $("auto").checked = settings.steps === "auto";
    if (rows.steps.box.value === "") rows.steps.box.value = "100";
    for (const name of Object.keys(facts.choices)) {
      const input = form.querySelector(`input[name="${name}"][value="${settings[name]}"]`);
      if (input) input.checked = true;
    }
    $("spectrum").value = settings.spectrum.join(", ");
    arrange();
  }
  function arrange() {
    rows.steps.box.disabled = rows.steps.slider.disabled = $("auto").checked;
    for (const part of form.querySelectorAll("[data-when]")) part.hidden = part.dataset.when !== choice("known");
  }
  function read() {
    const settings = {}, wrong = [];
    const mark = (input, bad) => { input.setAttribute("aria-invalid", String(bad)); if (bad) wrong.push(input.id); };
    for (const [name, { box, whole }] of Object.entries(rows)) {
      const value = Number(box.value), [least, most] = facts.limits[name];
      const used = !box.closest("[data-when]")?.hidden && !box.disabled;
      const bad = used && (box.value.trim() === "" || !(value >= least && value <= most) || (whole && !Number.isInteger(value)));
      mark(box, bad);
      if (used) settings[name] = value;
    }
    if ($("auto").checked) settings.steps = "auto";
    for (const name of Object.keys(facts.choices)) settings[name] = choice(name);
    if (settings.known === "spectrum") {
      const values = $("spectrum").value.split(/[\s,;]+/).filter(Boolean).map(Number);
      mark($("spectrum"), values.length === 0 || values.some((v) => !(v >= 0) || !Number.isFinite(v)));
      settings.spectrum = values;
    }
    return { settings, wrong };
  }

  /* ---- asking the server: one question at a time, always the newest ---- */
  const PATIENCE = 1500, PAUSE = 40;
  let wanted = null, asked = null, timer = 0;
  function changed() {
    arrange();
    const { settings, wrong } = read();
    if (wrong.length) {
      const [least, most] = facts.limits[wrong[0]] || [];
      const range = least === undefined ? "numbers of at least 0" : `${rows[wrong[0]].whole ? "a whole number" : "a number"} from ${short(least)} to ${short(most)}`;
      return fail(`${wrong[0].replace("_", " ")} takes ${range}.`);
    }
    wanted = settings;
    clearTimeout(timer);
    timer = setTimeout(next, PAUSE);
  }
  function next() {
    if (wanted === null) return;
    if (asked !== null) {  // a quick question is worth its answer; a slow one is given up
      const left = PATIENCE - (performance.now() - asked.since);
      if (left <= 0) asked.control.abort();
      else { clearTimeout(timer); timer = setTimeout(next, left); }
      return;
    }
    const settings = wanted;
    wanted = null;
    work(settings).finally(() => { asked = null; busy(wanted !== null); next(); });
  }
  async function work(settings) {
    busy(true);
    remember(settings);
    try {
      const found = await ask("plan", settings);
      [answer, running, planText] = [found, null, null];
      show();
      if (wanted === null) { running = await ask("running", settings); show(); }
      if (file === "plan.json" && wanted === null) { planText = await ask("plan.json", settings); showFile(); }
    } catch (error) {
      if (error.name !== "AbortError") fail(error.message);
    }
  }
  async function ask(kind, settings) {
    const control = new AbortController();
    asked = { control, since: performance.now() };
    let reply;
    try {
      reply = await fetch(`api/${kind}`, { method: "POST", signal: control.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(settings) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The planner does not answer. Is `diminuendo page` still running?");
    }
    const content = await reply.json();
    if (!reply.ok) throw new Error(content.error);
    document.body.dataset.latency = String(Math.round(performance.now() - asked.since));
    return content;
  }
  function busy(on) {
    $("busy").hidden = !on;
    document.body.classList.toggle("stale", on);
    document.body.dataset.state = on ? "busy" : "ready";
  }
  function fail(message) {
    $("error").textContent = message;
    $("error").hidden = false;
    $("status").textContent = message;
    document.body.classList.add("wrong");  // what is shown belongs to earlier settings
  }
  function remember(settings) {
    const parts = Object.entries(settings).filter(([name, value]) => String(value) !== String(facts.start[name]));
    const hash = parts.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
  }
  function recalled() {
    const settings = { ...facts.start };
    for (const part of location.hash.slice(1).split("&").filter(Boolean)) {
      const [name, text] = part.split("=").map(decodeURIComponent);
      if (!(name in settings) || text === undefined) continue;
      if (name === "spectrum") settings[name] = text.split(",").map(Number).filter(Number.isFinite);
      else if (name in facts.choices) { if (facts.choices[name].includes(text)) settings[name] = text; }
      else if (text === "auto" && name === "steps") settings[name] = text;
      else if (Number.isFinite(Number(text)) && text !== "") settings[name] = Number(text);
    }
    return settings;
  }

  /* ---- drawing ---- */
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  function ticks(least, most, count) {
    const rough = (most - least) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    const found = [];
    for (let k = Math.ceil(least / step - 1e-9); k * step <= most + 1e-9 * step; k++) found.push(rounded(k * step, 10));
    return found;
  }
  const decades = (least, most) => {
    const found = [];
    for (let p = Math.floor(Math.log10(least)); p <= Math.ceil(Math.log10(most)); p++)
      for (const k of most / least > 200 ? [1] : [1, 2, 5]) if (k * 10 ** p >= least * 0.999 && k * 10 ** p <= most * 1.001) found.push(k * 10 ** p);
    return found;
  };
  /* what: x values, lines [{values, kind, label, area}], log (y), logx, top and bottom of y, xticks, read(i) */
  function draw(id, what) {
    const place = $(id), width = place.clientWidth, height = place.clientHeight;
    if (!width) return;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": what.said });
    const all = what.lines.flatMap((line) => line.values);
    let top = what.top ?? Math.max(...all), bottom = what.bottom ?? (what.log ? Math.min(...all) : 0);
    if (!(top > bottom)) top = bottom === 0 ? 1 : bottom * 1.1;
    if (!what.log) top += 0.06 * (top - bottom); else { top *= 1.12; bottom /= 1.12; }
    const marks = what.log ? decades(bottom, top) : ticks(bottom, top, Math.max(2, Math.floor(height / 50)));
    const named = marks.map((y) => (what.format || short)(y));
    const left = 10 + 7 * Math.max(...named.map((t) => t.length), 2), right = 14, foot = 22, head = 8;
    const lx = what.logx ? Math.log : (v) => v, [x0, x1] = [lx(what.x[0]), lx(what.x[what.x.length - 1])];
    const X = (v) => left + (x1 > x0 ? (lx(v) - x0) / (x1 - x0) : 0.5) * (width - left - right);
    const ly = what.log ? Math.log : (v) => v, [y0, y1] = [ly(bottom), ly(top)];
    const Y = (v) => head + (1 - (ly(Math.max(v, what.log ? bottom : -Infinity)) - y0) / (y1 - y0)) * (height - head - foot);
    marks.forEach((y, i) => {
      svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
      svg.append(make("text", { x: left - 7, y: Y(y) + 4, "text-anchor": "end" }, named[i]));
    });
    const across = what.xticks || ticks(what.x[0], what.x[what.x.length - 1], Math.max(3, Math.floor(width / 90))).filter((t) => t >= what.x[0]);
    for (const t of across) svg.append(make("text", { x: X(t), y: height - 4, "text-anchor": width - X(t) < 25 ? "end" : X(t) - left < 2 ? "start" : "middle" }, what.xformat ? what.xformat(t) : short(t)));
    const inside = make("clipPath", { id: `${id}-inside` }), drawing = make("g", { "clip-path": `url(#${id}-inside)` });
    inside.append(make("rect", { x: left - 3, y: head - 4, width: width - left - right + 6, height: height - head - foot + 6 }));
    svg.append(inside, drawing);
    for (const line of what.lines) {
      const points = what.x.map((x, i) => `${X(x).toFixed(2)},${Y(line.values[i]).toFixed(2)}`);
      if (points.length === 1) points.push(`${width - right},${Y(line.values[0])}`), points.unshift(`${left},${Y(line.values[0])}`);
      if (line.area) drawing.append(make("path", { class: "area", d: `M${points[0].split(",")[0]},${Y(bottom)}L${points.join("L")}L${points[points.length - 1].split(",")[0]},${Y(bottom)}Z` }));
      drawing.append(make("path", { class: `line ${line.kind}`, d: `M${points.join("L")}` }));
      if (what.dots && line.kind === "plan") for (const one of points) {
        const [cx, cy] = one.split(",");
        svg.append(make("circle", { class: "small-dot", cx, cy, r: 2.6 }));
      }
    }
    for (const line of what.lines) if (line.label) {
      const i = Math.round(line.at * (what.x.length - 1)), y = Y(line.values[i]);
      svg.append(make("text", { class: `label ${line.kind}`, x: X(what.x[i]), y: line.below ? y + 16 : Math.max(y - 8, 12), "text-anchor": line.end || line.at > 0.8 ? "end" : line.at < 0.2 ? "start" : "middle" }, line.label));
    }
    const cursor = make("line", { class: "cursor", y1: head, y2: height - foot, visibility: "hidden" });
    const dot = make("circle", { class: "dot", r: 4.5, visibility: "hidden" });
    svg.append(cursor, dot);
    place.replaceChildren(svg);
    const out = $(what.out), last = what.x.length - 1;
    let at = place.reading ?? null;
    const point = (i) => {
      at = place.reading = i === null ? null : Math.min(Math.max(i, 0), last);
      for (const node of [cursor, dot]) node.setAttribute("visibility", at === null ? "hidden" : "visible");
      out.textContent = at === null ? "" : what.read(at);
      if (at === null) return;
      const x = X(what.x[at]);
      for (const [key, value] of [["x1", x], ["x2", x]]) cursor.setAttribute(key, value);
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", Y(what.lines[0].values[at]));
    };
    place.onpointermove = (event) => {
      const x = event.clientX - place.getBoundingClientRect().left;
      let nearest = 0;
      what.x.forEach((v, i) => { if (Math.abs(X(v) - x) < Math.abs(X(what.x[nearest]) - x)) nearest = i; });
      point(nearest);
    };
    place.onpointerleave = () => point(null);
    place.onblur = () => point(null);
    place.onkeydown = (event) => {
      const jump = { ArrowLeft: -1, ArrowRight: 1, PageDown: -Math.ceil(last / 10), PageUp: Math.ceil(last / 10) }[event.key];
      if (event.key === "Home") point(0); else if (event.key === "End") point(last);
      else if (jump) point(at === null ? (jump > 0 ? 0 : last) : at + jump); else return;
      event.preventDefault();
    };
    if (at !== null) point(at);
  }

  /* ---- showing an answer ---- */
  const put = (id, ...nodes) => $(id).replaceChildren(...nodes);
  const element = (name, text, kind) => Object.assign(document.createElement(name), { textContent: text, className: kind || "" });
  function show() {
    const { settings } = answer;
    $("error").hidden = true;
    document.body.classList.remove("wrong");
    put("t-epsilon", `ε = ${answer.epsilon_words}`);
    $("t-delta").textContent = `of ${plain(settings.epsilon)} at δ = ${plain(settings.delta)}, certified`;
    put("t-steps", answer.steps.toLocaleString("en"));
    $("t-sigma").textContent = `σ from ${short(answer.first)} to ${short(answer.last)}`;
    const change = answer.noise_ratio - 1;
    put("t-noise", Math.abs(change) < 5e-5 ? "the same" : `${percent(Math.abs(change))} ${change < 0 ? "less" : "more"}`);
    $("t-noise-words").textContent = "than uniform noise leaves";
    const needs = running && running.uniform_needs;
    put("t-needs", running === null ? "…" : needs ? `ε = ${short(Number(needs), 3)}` : "no more");
    $("t-needs-words").textContent = needs ? "for as little noise" : "";
    pictures();
    put("gain", element("strong", "Gain. "), answer.gain);
    put("erub", element("strong", "Worst case. "), `The bound on the final excess risk (ERUB) is ${answer.erub} of the initial one, with uniform noise in ${answer.uniform_steps.toLocaleString("en")} steps ${answer.erub_uniform}.` +
      (Number(answer.erub.replaceAll(",", "")) >= 1 ? " At 1 or above it says nothing; the privacy claim does not depend on it." : ""));
    mismatches();
    put("warnings", ...answer.warnings.map((text) => element("p", text, "note")));
    put("assumptions", ...answer.assumptions.map((text) => element("li", text)));
    $("digest").textContent = answer.digest;
    $("status").textContent = `${answer.steps.toLocaleString("en")} steps, ε = ${answer.epsilon_words}: computed and certified on this machine.`;
    showFile();
  }
  function pictures() {
    const { drawn, sigmas, uniform, speeds } = answer;
    const wide = Math.max(...sigmas, uniform) / Math.min(...sigmas, uniform) > 30;
    const flat = sigmas.map(() => uniform), rises = sigmas[0] > uniform;
    draw("c-noise", {
      x: drawn, log: wide, out: "r-noise", said: `Noise multiplier by step, from ${short(answer.first)} to ${short(answer.last)}; uniform noise would have ${short(uniform)}.`,
      lines: [
        { values: sigmas, kind: "plan", area: true, label: "this plan", at: rises ? 0.1 : 0.12, below: !rises },
        { values: flat, kind: "uniform", label: "uniform noise", at: 0.98, below: sigmas[sigmas.length - 1] > uniform },
      ],
      read: (i) => `step ${drawn[i].toLocaleString("en")}: σ = ${short(sigmas[i])}`,
    });
    const byStep = running && running.epsilon;
    if (byStep) draw("c-epsilon", {
      x: running.steps, dots: running.steps.length < drawn.length, bottom: 0, top: Math.max(answer.settings.epsilon, ...byStep), out: "r-epsilon", said: `Certified epsilon after each step, ending at ${answer.epsilon_words}.`,
      lines: [
        { values: byStep, kind: "plan", area: true },
        { values: byStep.map(() => answer.settings.epsilon), kind: "uniform", label: "budget", at: 0.02, below: true },
      ],
      read: (i) => `step ${running.steps[i].toLocaleString("en")}: ε ≤ ${running.epsilon_words[i]}`,
    });
    else put("c-epsilon", element("p", "…", "hint"));
    const best = speeds.map((s) => s.best);
    const asked = (s) => answer.gamma === null ? `${short(s.speed, 2)} × as fast` : `γ = ${short(answer.gamma ** s.speed, 4)}`;
    draw("c-speed", {
      x: speeds.map((s) => s.speed), logx: true, out: "r-speed", bottom: 0, format: (y) => percent(y).replace(".0", ""),
      top: Math.max(1.05, Math.min(2.5, Math.max(...speeds.map((s) => s.plan)))), xticks: [0.125, 0.5, 1, 2, 8],
      xformat: (s) => ({ 0.125: "8 × slower", 0.5: "½", 1: "as planned", 2: "2", 8: "8 × faster" })[s],
      said: "Noise left in the final loss, over that of uniform noise, if the loss converges slower or faster than planned for.",
      lines: [
        { values: speeds.map((s) => s.plan), kind: "plan", label: "this plan", at: 0.97 },
        { values: speeds.map(() => 1), kind: "uniform", label: "uniform noise", at: 0.02, below: speeds[0].plan > 1 },
        ...(best[0] === null ? [] : [{ values: best, kind: "best", label: "if you had known", at: 0.4, below: true, end: true }]),
      ],
      read: (i) => `${asked(speeds[i])}: ${percent(speeds[i].plan)}`,
    });
    $("dots").hidden = !(running && running.steps.length < drawn.length);
    $("f-lr").hidden = answer.lr === null;
    $("lr-unit").textContent = answer.settings.known === "spectrum" ? "one over an eigenvalue" : "1/M";
    if (answer.lr !== null) draw("c-lr", {
      x: drawn, bottom: 0, out: "r-lr", said: "Learning rate by step.", lines: [{ values: answer.lr, kind: "plan", area: true }],
      read: (i) => `step ${drawn[i].toLocaleString("en")}: ${short(answer.lr[i])}`,
    });
  }
  function mismatches() {
    if (!answer.mismatches.length) return put("mismatch");
    const table = document.createElement("table"), body = document.createElement("tbody"), head = document.createElement("thead");
    const line = document.createElement("tr");
    for (const title of ["If training uses a learning rate that is", "noise, against uniform noise", "against a plan made for it"]) line.append(element("th", title));
    head.append(line);
    for (const one of answer.mismatches) {
      const row = document.createElement("tr");
      row.append(element("td", one.used));
      for (const value of [one.uniform, one.planned]) {
        const change = value - 1;
        const said = Math.abs(change) < 5e-4 ? "the same" : value > 3 ? `${short(value, 2)} × as much` : `${percent(Math.abs(change))} ${change > 0 ? "more" : "less"}`;
        row.append(element("td", said, change > 0.0005 ? "worse" : ""));
      }
      body.append(row);
    }
    table.append(head, body);
    const scroll = element("div", "", "scroll");
    scroll.append(table);
    put("mismatch", scroll);
  }

  /* ---- files ---- */
  const names = ["plan.json", "train.py", "opacus_train.py", "run.toml"];
  const titles = { "plan.json": "plan.json", "train.py": "Python", "opacus_train.py": "Opacus", "run.toml": "run.toml" };
  for (const name of names) {
    const tab = Object.assign(document.createElement("button"), { type: "button", textContent: titles[name] });
    tab.setAttribute("role", "tab");
    tab.dataset.file = name;
    tab.addEventListener("click", () => choose(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const other = names[(names.indexOf(name) + step + names.length) % names.length];
      choose(other);
      $("tabs").querySelector(`[data-file="${other}"]`).focus();
    });
    $("tabs").append(tab);
  }
  function choose(name) {
    file = name;
    showFile();
    if (live && name === "plan.json" && planText === null && answer !== null && asked === null)
      ask("plan.json", answer.settings).then((text) => { planText = text; showFile(); }, (error) => fail(error.message)).finally(() => { asked = null; next(); });
  }
  const text = () => answer && (file === "plan.json" && live ? planText : answer.exports[file]);
  function showFile() {
    for (const tab of $("tabs").children) {
      tab.setAttribute("aria-selected", String(tab.dataset.file === file));
      tab.tabIndex = tab.dataset.file === file ? 0 : -1;
    }
    const content = text();
    $("file").textContent = content === null ? "…" : content.length > 6000 ? `${content.slice(0, 6000)}…` : content;
    if (file === "plan.json") $("file").textContent = $("file").textContent.replace(/, "/g, ',\n "').replace(/^\{"/, '{\n "');
    $("copy").disabled = $("save").disabled = !content;
    $("copy").textContent = "Copy";
  }
  $("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text()); $("copy").textContent = "Copied"; }
    catch { getSelection().selectAllChildren($("file")); $("copy").textContent = "Selected: press Ctrl+C"; }
  });
  $("save").addEventListener("click", () => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text()], { type: "text/plain" })), download: file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });

  /* ---- begin ---- */
  $("version").textContent = facts.version;
  let width = 0;
  new ResizeObserver(() => { if (answer && innerWidth !== width) { width = innerWidth; pictures(); } }).observe(document.body);
  if (live) {
    $("about").textContent = "Served from this machine to itself. Nothing you enter leaves it.";
    fill(recalled());
    choose("plan.json");
    changed();
    window.addEventListener("hashchange", () => { fill(recalled()); changed(); });
  } else {
    $("about").textContent = "A snapshot. `diminuendo page` opens one that answers.";
    $("fields").disabled = true;
    fill(facts.start);
    [answer, running] = [facts.answer, facts.running];
    file = "plan.json";
    show();
    busy(false);
  }
})();
