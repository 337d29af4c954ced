// The page of one or several runs. Two sources: a dashboard's server (its JSON is described in monitoring/dashboard.py), or
// data inside the page, {runs: {name: overview}, samples: {name: {kind: {step: rows}}}, tokens, tables}.
// Nothing that a run has written is ever parsed as HTML: text goes through `h`, which makes text nodes.
"use strict";

(() => {
  const POLL_MS = 3000;
  const PAGE_ROWS = 20;
  const COLOURS = 8;
  const SMOOTH_FROM = 12; // points
  const SPARSE = 50; // number of validations up to which each has a marker with its error
  const $ = (id) => document.getElementById(id);

  function h(tag, props = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, to] of Object.entries(value)) node.style.setProperty(key, to);
      else if (name === "class") node.className = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  // ---- state: what is chosen, kept in the address -------------------------------------------------------------

  const DEFAULTS = { run: [], x: "step", smooth: "", more: [], of: "", kind: "", step: "", view: "", sort: "",
    prompt: "", set: "", colour: "", search: "" };
  const chosen = { ...DEFAULTS };

  function readAddress() {
    const found = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    for (const [key, value] of Object.entries(DEFAULTS)) {
      chosen[key] = Array.isArray(value) ? found.getAll(key) : found.get(key) ?? value;
    }
  }

  function writeAddress() {
    const now = new URLSearchParams();
    for (const [key, value] of Object.entries(chosen)) {
      for (const one of Array.isArray(value) ? value : [value]) if (one !== "") now.append(key, one);
    }
    history.replaceState(null, "", `#${now}`);
  }

  function choose(changes) {
    Object.assign(chosen, changes);
    writeAddress();
  }

  // ---- sources ------------------------------------------------------------------------------------------------

  function frozen(data) {
    const steps = (name, kind) => data.samples[name]?.[kind] ?? {};
    return {
      isLive: false,
      kinds: (name) => Object.fromEntries(Object.entries(data.samples[name] ?? {}).map(
        ([kind, rows]) => [kind, Object.keys(rows).map(Number)])),
      runs: async () => Object.keys(data.runs).map((name) => {
        const { state } = data.runs[name];
        return { name, state: state.state, step: state.step, max_steps: state.max_steps, reward: null };
      }),
      overview: async (name) => data.runs[name],
      samples: async (name, kind, step) => {
        const rows = steps(name, kind)[step] ?? [];
        const known = Object.values(data.tokens?.[name]?.[kind]?.[step] ?? {})[0];
        return { rows, total: rows.length, columns: Object.keys(known ?? {}) };
      },
      tokens: async (name, kind, step) => ({ tokens: data.tokens?.[name]?.[kind]?.[step] ?? {} }),
      prompt: async (name, kind, prompt) => ({
        rows: Object.values(steps(name, kind)).flat().filter((row) => row.prompt_id === prompt),
      }),
      tables: async () => ({ tables: data.tables ?? [] }),
    };
  }

  function live() {
    async function ask(path, query = []) {
      const response = await fetch(`api/${path}?${new URLSearchParams(query)}`, { signal: AbortSignal.timeout(30000) });
      if (response.status === 204) return null;
      const answer = await response.json();
      if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
      return answer;
    }
    return {
      isLive: true,
      kinds: (name) => overviews.get(name)?.kinds ?? {},
      runs: async () => (await ask("runs")).runs,
      overview: (name, stamp) => ask("run", { name, stamp: stamp ?? "" }),
      samples: (name, kind, step) => ask("samples", { name, kind, step }),
      tokens: (name, kind, step, prompt) => ask("tokens", { name, kind, step, prompt }),
      prompt: (name, kind, prompt) => ask("prompt", { name, kind, prompt }),
      tables: (names) => ask("tables", names.map((name) => ["name", name])),
    };
  }

  const inline = $("data");
  const overviews = new Map(); // of the chosen runs, by name
  const source = inline ? frozen(JSON.parse(inline.textContent)) : live();
  let runs = [];

  // ---- numbers and colours ------------------------------------------------------------------------------------

  function show(value, form = "") {
    if (value === null || value === undefined) return "–";
    if (form === "percent") return `${(100 * value).toFixed(1)}%`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
    if (Number.isInteger(value) || size >= 1000) return value.toFixed(0);
    return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  }

  const signed = (value) => (value > 0 ? "+" : "") + show(value);
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const variable = (index) => `var(--c${(index % COLOURS) + 1})`;

  function resolved(colour, alpha = 1) { // to rgba(), for Plotly, which knows no CSS variables
    const probe = document.body.appendChild(h("i", { style: { color: colour }, hidden: true }));
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    probe.remove();
    return `rgba(${r},${g},${b},${alpha})`;
  }

  const colourOf = (name) => Math.max(0, chosen.run.indexOf(name));

  // ---- theme --------------------------------------------------------------------------------------------------

  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.style.colorScheme || (systemDark.matches ? "dark" : "light")) === "dark";

  function setTheme(theme) {
    document.documentElement.style.colorScheme = theme;
    $("theme").textContent = isDark() ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  }

  function remembered() {
    try { return localStorage.getItem("theme") ?? ""; } catch { return ""; } // files may have no storage
  }

  $("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    setTheme(theme);
    try { localStorage.setItem("theme", theme); } catch { /* then it lasts as long as the page */ }
    drawCharts();
    drawSamples();
  });
  systemDark.addEventListener("change", () => { setTheme(remembered()); drawCharts(); });

  // ---- list of runs -------------------------------------------------------------------------------------------

  function drawRuns() {
    const wanted = $("runs-filter").value.toLowerCase();
    const shown = runs.filter((run) => run.name.toLowerCase().includes(wanted));
    $("sidebar").hidden = !source.isLive && runs.length < 2;
    $("runs-count").textContent = shown.length < runs.length ? `${shown.length} of ${runs.length}` : runs.length;
    const focused = document.activeElement?.dataset?.run;
    const wasBox = document.activeElement?.type === "checkbox";
    $("runs").replaceChildren(...shown.map((run) => {
      const isChosen = chosen.run.includes(run.name);
      const steps = run.max_steps > 0 ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`;
      const reward = run.reward === null ? "" : `, reward ${show(run.reward)}`;
      return h("li", { class: isChosen ? "chosen" : "", style: isChosen ? { "--run": variable(colourOf(run.name)) } : {} },
        h("input", { type: "checkbox", checked: isChosen, "data-run": run.name, "aria-label": `Overlay ${run.name}`,
          onchange: () => selectRuns(isChosen ? chosen.run.filter((name) => name !== run.name) : [...chosen.run, run.name]) }),
        h("button", { type: "button", "data-run": run.name, title: `Show ${run.name} alone`,
          onclick: () => selectRuns([run.name]) },
          run.name, h("small", {}, h("span", { class: `dot ${run.state}` }), `${run.state}, ${steps}${reward}`),
          run.fault ? h("small", { class: "fault" }, run.fault) : ""));
    }));
    if (focused) {
      [...$("runs").querySelectorAll(wasBox ? "input" : "button")].find((node) => node.dataset.run === focused)?.focus();
    }
  }

  async function selectRuns(names) {
    choose({ run: names.length ? names : chosen.run.slice(0, 1) });
    drawRuns();
    await refresh();
  }

  // ---- one run's words ----------------------------------------------------------------------------------------

  const main = () => overviews.get(chosen.of) ?? overviews.get(chosen.run[0]);

  function table({ title, note, columns, rows }, valueFrom = Infinity) {
    return h("div", { class: "card table" }, h("h3", {}, title),
      h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: i >= valueFrom ? "value" : "" }, cell))))))),
      note ? h("p", { class: "soft hint" }, note) : null);
  }

  function drawWords() {
    const run = main();
    const several = chosen.run.length > 1;
    $("title").textContent = several ? `${chosen.run.length} runs` : run.name;
    document.title = `${$("title").textContent} · reinforce_rl`;
    const { state, step, max_steps: of, reason } = run.state;
    $("state").hidden = several;
    $("state").title = reason;
    $("state").replaceChildren(h("span", { class: `dot ${state}` }), of > 0 ? `${state}, step ${step} of ${of}` : `${state}, step ${step}`);
    $("verdict").textContent = several ? "" : run.verdict;
    $("verdict").hidden = several || !run.verdict;
    $("verdict").className = `verdict ${run.tone}`;
    const alerts = chosen.run.flatMap((name) => (overviews.get(name)?.alerts ?? []).map((alert) => ({ ...alert, run: name })));
    $("alerts").hidden = alerts.length === 0;
    $("alerts").replaceChildren(...alerts.map((alert) => h("li", { class: alert.kind }, several ? h("b", {}, `${alert.run}: `) : null,
      alert.count > 1 ? `steps ${alert.first} to ${alert.last} (${alert.count}), in step ${alert.last}: ` : `step ${alert.last}: `, alert.text)));
    $("span").textContent = several ? `${run.name}: ${run.span}` : run.span;
    $("tables").replaceChildren(...run.tables.filter((one) => one.rows.length).map((one) => table(one)));
    const { settings, changes, text } = run.config;
    const title = settings.length ? `What differs from the defaults${several ? `: ${run.name}` : ""}` : "Nothing differs from the defaults";
    $("settings").replaceChildren(
      ...changes.map((change) => h("p", { class: "soft" }, change)),
      text ? table({ title, columns: settings.length ? ["key", "value", "default"] : [], rows: settings }, 1)
        : h("p", { class: "soft" }, "This run has no config.yaml."));
    $("whole").hidden = !text;
    $("yaml").textContent = text;
  }

  // ---- curves -------------------------------------------------------------------------------------------------

  const cards = new Map(); // by title: {node, plot, hidden: Set of names, isLog, isWide}

  function points(run, key) {
    const series = run.series[key];
    if (!series) return null;
    const axis = run.axes[series.axis];
    if (chosen.x === "step") return { x: axis.step, y: series.y };
    const start = Math.min(...run.axes.map((one) => one.time[0] ?? Infinity));
    return { x: axis.time.map((time) => (time === null ? null : (time - start) / 3600)), y: series.y };
  }

  function smoothed(y, weight) { // exponential, debiased as in Adam
    let total = 0, share = 0;
    return y.map((value) => {
      if (value === null) return null;
      total = weight * total + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return Number((total / share).toPrecision(10)); // a constant stays one
    });
  }

  function charts() {
    const found = new Map();
    for (const name of chosen.run) {
      for (const chart of overviews.get(name)?.charts ?? []) {
        const known = found.get(chart.title);
        if (!known) found.set(chart.title, { ...chart, lines: [...chart.lines] });
        else known.lines.push(...chart.lines.filter(([, key]) => !known.lines.some((line) => line[1] === key)));
      }
    }
    for (const key of chosen.more) found.set(key, { title: key, unit: "", form: "", lines: [[key, key]], isExtra: true });
    return [...found.values()];
  }

  function traces(chart, card) {
    const several = chosen.run.length > 1;
    const weight = Number(chosen.smooth || 0.6);
    const isStacked = chart.form === "stacked" && !several;
    const lines = chart.form === "stacked" && several ? [["whole step", "timers/step_time"]] : chart.lines;
    const made = [];
    const chips = [];
    for (const [index, name] of chosen.run.entries()) {
      const run = overviews.get(name);
      lines.forEach(([label, key], line) => {
        const data = run && points(run, key);
        if (!data) return;
        const colour = variable(several ? index : line);
        const title = several ? (lines.length > 1 ? `${name}, ${label}` : name) : label;
        if (!several) {
          chips.push({ title: label, colour, value: show(data.y.findLast((value) => value !== null), chart.form) });
        } else if (lines.length > 1 && !chips.some((chip) => chip.title === label)) { // the runs' legend is above all charts
          chips.push({ title: label, colour: "var(--soft)", dotted: line % 2 === 1 });
        }
        if (card.hidden.has(label)) return;
        const sparse = (key.startsWith("val/") && data.y.length <= SPARSE) || data.y.length === 1;
        const isSmooth = !isStacked && !sparse && weight > 0 && data.y.length >= SMOOTH_FROM;
        const y = isSmooth ? smoothed(data.y, weight) : data.y;
        const error = run.series[`${key}_error`]?.y;
        const form = chart.form === "percent" ? ".1%" : ".4~g";
        const base = { x: data.x, name: escaped(title), type: "scatter", connectgaps: key.startsWith("val/") };
        if (isStacked) {
          made.push(data.y.length === 1
            ? { ...base, y, type: "bar", marker: { color: resolved(colour) }, hovertemplate: `%{y:${form}}` }
            : { ...base, y: y.map((value) => value ?? 0), stackgroup: "one", mode: "lines", line: { width: .5, color: resolved(colour) },
              fillcolor: resolved(colour, .75), hovertemplate: `%{y:${form}}` });
          return;
        }
        if (error && !sparse && !several) {
          const edge = (sign) => smoothed(data.y.map((value, i) => (value === null || error[i] === null ? null : value + sign * error[i])), isSmooth ? weight : 0);
          const band = { ...base, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
          made.push({ ...band, y: edge(-1) }, { ...band, y: edge(1), fill: "tonexty", fillcolor: resolved(colour, .16) });
        }
        if (isSmooth) made.push({ ...base, y: data.y, mode: "lines", line: { width: 1, color: resolved(colour, .3) }, hoverinfo: "skip" });
        made.push({ ...base, y, mode: sparse ? "lines+markers" : "lines",
          line: { width: 2, color: resolved(colour), dash: several && line % 2 ? "dot" : several && index >= COLOURS ? "dash" : "solid" },
          marker: { size: 6, symbol: ["circle", "square", "diamond", "triangle-up"][several ? index % 4 : line % 4] },
          error_y: sparse && error && chosen.run.length <= 4 ? { array: error, color: resolved(colour, .6), thickness: 1.2, width: 3 } : undefined,
          customdata: data.y, hovertemplate: isSmooth ? `%{customdata:${form}}  (smooth %{y:${form}})` : `%{y:${form}}` });
      });
    }
    return { made, chips, isStacked };
  }

  function newCard(chart) {
    const card = { hidden: new Set(), isLog: false, isWide: false };
    const toggle = (name, text, apply) => h("button", { type: "button", "aria-pressed": "false", title: name, "aria-label": `${name}: ${chart.title}`,
      onclick: (event) => { apply(event.currentTarget); drawCharts(); } }, text);
    const pressed = (button, on) => { button.setAttribute("aria-pressed", on); return on; };
    card.about = h("p", { class: "soft hint", hidden: true });
    card.ask = toggle("What it means", "?", (button) => { card.about.hidden = !pressed(button, card.about.hidden); });
    card.chips = h("div", { class: "chips" });
    card.plot = h("div", { class: "plot", role: "img" });
    card.node = h("article", { class: "card chart" },
      h("header", {}, h("h3", {}, chart.title), h("span", { class: "soft" }, chart.unit), h("div", {}, card.ask,
        toggle("Logarithmic axis", "log", (button) => { card.isLog = pressed(button, !card.isLog); }),
        toggle("Larger", "⤢", (button) => { card.isWide = pressed(button, !card.isWide); card.node.classList.toggle("wide", card.isWide); }),
        chart.isExtra ? toggle("Remove", "✕", () => choose({ more: chosen.more.filter((key) => key !== chart.title) })) : null)),
      card.about, card.chips, card.plot);
    return card;
  }

  const PLOTLY = { displayModeBar: false, responsive: true };

  function layoutOf({ grid, soft, text, card }, x, form) {
    const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true, tickfont: { color: soft } };
    return {
      margin: { l: 46, r: 8, t: 6, b: 30 }, showlegend: false, hovermode: "x unified", barmode: "stack",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
      hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: text }, namelength: 40 },
      xaxis: { ...axis, title: { text: x, font: { color: soft }, standoff: 4 }, nticks: 7, tickformat: x === "step" ? "d" : "~g",
        hoverformat: x === "step" ? "d" : ".3~g", unifiedhovertitle: { text: `${x} %{x}` } },
      yaxis: { ...axis, nticks: 6, tickformat: form === "percent" ? ".0%" : "", exponentformat: "e",
        rangemode: form === "stacked" ? "tozero" : "normal", range: form === "percent" ? [-0.02, 1.02] : undefined },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
  }

  function drawFigures(look) { // of another x than the step, such as a calibration
    $("figures").replaceChildren(...(main().figures ?? []).map((figure) => {
      const plot = h("div", { class: "plot", role: "img", "aria-label": figure.title });
      const made = figure.lines.map(({ name, x, y }, i) => ({ x, y, name: escaped(name), type: "scatter", mode: "lines+markers",
        line: { color: resolved(variable(i)), dash: i ? "dot" : "solid" }, hovertemplate: figure.form === "percent" ? "%{y:.1%}" : "%{y:.4~g}" }));
      requestAnimationFrame(() => Plotly.newPlot(plot, made, layoutOf(look, figure.x, figure.form), PLOTLY));
      return h("article", { class: "card chart" }, h("header", {}, h("h3", {}, figure.title), h("span", { class: "soft" }, figure.unit)),
        h("div", { class: "chips" }, figure.lines.map(({ name }, i) => h("span", { class: "soft" },
          h("span", { class: "key", style: { background: variable(i) } }), name, " "))), plot);
    }));
  }

  function drawCharts() {
    if (!window.Plotly || overviews.size === 0) return;
    const all = charts();
    const look = { grid: resolved("var(--grid)"), soft: resolved("var(--soft)"), text: resolved("var(--text)"), card: resolved("var(--card)") };
    const most = Math.max(...chosen.run.flatMap((name) => overviews.get(name)?.axes.map((axis) => axis.step.length) ?? []), 0);
    $("smooth").disabled = most < SMOOTH_FROM;
    for (const [title, card] of cards) {
      if (!all.some((chart) => chart.title === title)) { Plotly.purge(card.plot); card.node.remove(); cards.delete(title); }
    }
    for (const chart of all) {
      let card = cards.get(chart.title);
      if (!card) cards.set(chart.title, card = newCard(chart));
      const { made, chips, isStacked } = traces(chart, card);
      card.chips.replaceChildren(...chips.map((chip) => h("button", { type: "button", "aria-pressed": String(!card.hidden.has(chip.title)), title: "Show or hide",
        onclick: () => { card.hidden.has(chip.title) ? card.hidden.delete(chip.title) : card.hidden.add(chip.title); drawCharts(); } },
        h("span", { class: chip.dotted ? "key dotted" : "key", style: { background: chip.dotted ? undefined : chip.colour, "background-color": chip.colour } }),
        chip.title, " ", chip.value === undefined ? null : h("b", {}, chip.value))));
      card.plot.setAttribute("aria-label", `${chart.title}, last values: ${chips.map((chip) => `${chip.title} ${chip.value ?? ""}`).join(", ")}`);
      card.about.textContent = main().about?.[chart.lines[0][1]] ?? "";
      card.ask.hidden = !card.about.textContent;
      const layout = layoutOf(look, chosen.x === "step" ? "step" : "hours", chart.form);
      layout.yaxis.type = card.isLog && !isStacked ? "log" : "linear";
      layout.uirevision = `${chosen.x} ${card.isLog} ${chosen.run}`;
      if (!card.node.isConnected) $("charts").append(card.node);
      Plotly.react(card.plot, made, layout, PLOTLY);
      if (card.wasWide !== card.isWide) { card.wasWide = card.isWide; Plotly.Plots.resize(card.plot); }
    }
    drawFigures(look);
    $("legend").replaceChildren(...(chosen.run.length > 1 ? chosen.run.map((name, i) => h("li", {},
      h("span", { class: "key", style: { background: variable(i) } }), name)) : []));
    const drawn = new Set(all.flatMap((chart) => chart.lines.map(([, key]) => key)));
    const others = [...new Set(chosen.run.flatMap((name) => Object.keys(overviews.get(name)?.series ?? {})))];
    options($("more"), [["", "a metric …"], ...others.filter((key) => !drawn.has(key) && !key.endsWith("_error")).sort().map((key) => [key, key])], "");
  }

  // ---- samples ------------------------------------------------------------------------------------------------

  const shown = { rows: [], columns: [], first: new Map(), total: 0, limit: PAGE_ROWS, key: "" };
  const identity = (row) => `${row.prompt_id} ${row.sample_id}`;

  function options(select, pairs, value) {
    const same = select.length === pairs.length && pairs.every(([key, text], i) => select.options[i].value === key && select.options[i].text === text);
    if (!same) select.replaceChildren(...pairs.map(([key, text]) => h("option", { value: key }, text)));
    select.value = value;
  }

  async function loadSamples() {
    const run = main();
    if (!run) return;
    const name = overviews.has(chosen.of) ? chosen.of : chosen.run[0];
    const kinds = source.kinds(name);
    const names = Object.keys(kinds);
    $("samples").hidden = names.length === 0;
    if (names.length === 0) return;
    const kind = kinds[chosen.kind] ? chosen.kind : names.find((one) => one.startsWith("val")) ?? names[0];
    const steps = kinds[kind];
    const step = steps.includes(Number(chosen.step)) && chosen.step !== "" ? Number(chosen.step) : steps.at(-1);
    const view = chosen.view || (kind === "rollouts" ? "groups" : "change");
    options($("of"), chosen.run.map((one) => [one, one]), name);
    $("of-label").hidden = chosen.run.length < 2;
    options($("kind"), names.map((one) => [one, one]), kind);
    options($("step"), steps.map((one) => [String(one), String(one)]), String(step));
    $("view").value = view;
    $("previous").disabled = view === "steps" || step === steps[0];
    $("next").disabled = view === "steps" || step === steps.at(-1);
    $("step").disabled = view === "steps";
    const key = JSON.stringify([name, kind, step, view, view === "steps" && chosen.prompt, source.isLive && run.stamp]);
    if (key === shown.key) return drawSamples();
    const begun = shown.begun = {};
    let rows, total, columns, first = new Map();
    try {
      ({ rows, total, columns = [] } = await source.samples(name, kind, step));
      const prompts = [...new Map(rows.map((row) => [row.prompt_id, row.prompt])).entries()];
      const prompt = prompts.some(([id]) => String(id) === chosen.prompt) || chosen.prompt !== "" ? Number(chosen.prompt) : prompts[0]?.[0];
      if (!prompts.some(([id]) => id === prompt)) prompts.unshift([prompt, "of another step"]);
      if (view === "steps") {
        options($("prompt"), prompts.map(([id, text]) => [String(id), `${id}: ${text.replace(/<\|.*?\|>/g, " ").trim().slice(-60)}`]), String(prompt));
        ({ rows } = await source.prompt(name, kind, prompt));
        total = rows.length;
      } else if (kind !== "rollouts" && step !== steps[0]) {
        first = new Map((await source.samples(name, kind, steps[0])).rows.map((row) => [identity(row), row]));
      }
    } catch (error) {
      if (shown.begun === begun) $("samples-count").textContent = error.message;
      return;
    }
    if (shown.begun !== begun) return; // another choice was made meanwhile
    for (const row of rows) {
      const before = first.get(identity(row))?.reward;
      row.change = typeof before === "number" && typeof row.reward === "number" ? row.reward - before : null;
    }
    Object.assign(shown, { key, rows, first, total, columns, view, steps, step, name, kind });
    drawSamples();
  }

  function marked(text) {
    const wanted = chosen.search.trim().toLowerCase();
    if (!wanted) return [text];
    const parts = [];
    let from = 0;
    for (let at = text.toLowerCase().indexOf(wanted); at >= 0; at = text.toLowerCase().indexOf(wanted, from)) {
      parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + wanted.length)));
      from = at + wanted.length;
    }
    return [...parts, text.slice(from)];
  }

  function response(row, most, label = `sample ${row.sample_id}`) {
    const meta = h("div", { class: "meta" }, h("b", {}, label), h("span", {}, "reward ", h("b", {}, row.reward === null ? "failed" : show(row.reward))));
    if (row.change !== null && row.change !== undefined) {
      meta.append(h("span", { class: row.change > 0 ? "up" : row.change < 0 ? "down" : "" }, `${signed(row.change)} since step ${shown.steps[0]}`));
    }
    for (const [name, value] of Object.entries(row.source_rewards ?? {})) meta.append(h("span", {}, `${name} ${show(value)}`));
    if (row.kl !== null) meta.append(h("span", {}, `KL ${show(row.kl)}`));
    if (row.advantage !== null) meta.append(h("span", {}, "advantage ", h("b", {}, signed(row.advantage))));
    const ended = row.finish_reason === "stop" ? "not truncated" : row.finish_reason === "length" ? "cut at the limit" : row.finish_reason;
    meta.append(h("span", {}, `${row.response_length} tokens, ${ended}`));
    if (row.score_fault) meta.append(h("span", { class: "down" }, row.score_fault));
    if (!row.valid) meta.append(h("span", { class: "down" }, "left out of the loss"));
    let bar = null;
    if (most > 0 && row.advantage !== null) {
      const share = 50 * Math.abs(row.advantage) / most;
      bar = h("div", { class: "advantage", title: `advantage ${signed(row.advantage)}` }, h("i", { style: row.advantage >= 0
        ? { left: "50%", width: `${share}%`, background: "var(--c1)" } : { right: "50%", width: `${share}%`, background: "var(--c2)" } }));
    }
    return h("div", {}, meta, bar, h("div", { class: "text", tabindex: "0" }, ...tokens(row)));
  }

  // Per token, in nats unless said otherwise; null where the run has not recorded it.
  const COLOURINGS = {
    generator: ["policy − generator", ["policy_log_probs", "generator_log_probs"]],
    reference: ["policy − reference", ["policy_log_probs", "reference_log_probs"]],
    kl: ["KL to the reference", ["token_kl"]],
    advantage: ["advantage", ["token_advantages"]],
    probability: ["log-prob of the policy", ["policy_log_probs"]],
  };
  const known = new Map(); // tokens by tokenKey: {identity: {token_texts, policy_log_probs, ...}}
  const wanted = new Set(); // keys that the last drawing lacked
  const tokenKey = (row) => JSON.stringify([shown.name, shown.kind, row.step, row.prompt_id]);

  function coloured(values, [first, second]) {
    return values[first]?.map((value, i) => {
      const other = second ? values[second]?.[i] : 0;
      return typeof value === "number" && typeof other === "number" ? value - other : null;
    });
  }

  function tokens(row) {
    const colouring = COLOURINGS[chosen.colour]?.[1];
    if (!colouring || $("colour-label").hidden) return marked(row.response);
    if (!known.has(tokenKey(row))) wanted.add(tokenKey(row));
    const found = known.get(tokenKey(row))?.[identity(row)];
    const values = found && coloured(found, colouring);
    if (!values) return marked(row.response);
    return found.token_texts.map((text, i) => {
      const share = values[i] === null ? 0 : Math.min(1, Math.abs(values[i]) / shown.scale);
      const rgb = values[i] > 0 ? "20 120 200" : "214 96 22";
      const lines = Object.entries(found).filter(([key]) => key !== "token_texts").map(([key, all]) => `${key.replaceAll("_", " ")} ${show(all[i])}`);
      return h("span", { class: "token", title: [JSON.stringify(text), ...lines].join("\n"),
        style: { "background-color": `rgb(${rgb} / ${(0.75 * share).toFixed(3)})` } }, text);
    });
  }

  async function loadTokens() {
    const lacking = [...wanted];
    wanted.clear();
    if (lacking.length === 0) return;
    await Promise.all(lacking.map(async (key) => {
      let found = {};
      try {
        found = (await source.tokens(...JSON.parse(key))).tokens;
      } catch { /* the step may be gone; its text is still shown */ }
      known.set(key, found);
    }));
    drawSamples();
  }

  function drawScale() { // so that one outlier leaves colour to the others
    const colouring = COLOURINGS[chosen.colour];
    const all = [...known.entries()].filter(([key]) => key.startsWith(JSON.stringify([shown.name, shown.kind]).slice(0, -1)))
      .flatMap(([, found]) => Object.values(found)).flatMap((values) => (colouring && coloured(values, colouring[1])) ?? []);
    const sizes = all.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    shown.scale = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1e-9;
    $("scale").hidden = !colouring || $("colour-label").hidden || sizes.length === 0;
    $("scale").replaceChildren(`${colouring?.[0]}: −${show(shown.scale)} `, h("i"), ` +${show(shown.scale)}`);
  }

  function card(rows, body) {
    const id = rows[0].prompt_id;
    const view = (name, text) => h("button", { type: "button", onclick: () => { choose({ view: name, prompt: String(id) }); loadSamples(); } }, text);
    const meta = h("div", { class: "meta" }, h("b", {}, `prompt ${id}`),
      h("span", { class: "push" }, shown.view === "steps" ? null : view("steps", "over steps")));
    const record = (rows[0].record ?? "{}") === "{}" ? null : h("div", { class: "meta" }, h("span", {}, rows[0].record));
    return h("article", { class: "card sample" }, meta, h("div", { class: "text prompt", tabindex: "0" }, ...marked(rows[0].prompt)), record, body);
  }

  function byPrompt(rows) {
    const groups = new Map();
    for (const row of rows) groups.set(row.prompt_id, [...(groups.get(row.prompt_id) ?? []), row]);
    return [...groups.values()];
  }

  function drawSamples() {
    const { view } = shown;
    if (!view) return;
    const colourings = Object.entries(COLOURINGS).filter(([, [, columns]]) => columns.every((column) => shown.columns.includes(column)));
    $("colour-label").hidden = colourings.length === 0;
    options($("colour"), [["", "nothing"], ...colourings.map(([key, [name]]) => [key, name])], chosen.colour);
    drawScale();
    $("prompt-label").hidden = view !== "steps";
    const hasChange = shown.rows.some((row) => row.change !== null);
    for (const option of $("sort").options) option.hidden = option.value.endsWith("change") && !hasChange;
    $("sort").value = chosen.sort;
    if ($("search").value !== chosen.search) $("search").value = chosen.search;
    const sets = [...new Set(shown.rows.map((row) => row.set_name ?? ""))]; // validation sets with names
    $("set-label").hidden = sets.length < 2;
    options($("set"), [["", "all"], ...sets.filter(Boolean).map((one) => [one, one])], sets.includes(chosen.set) ? chosen.set : "");
    const set = $("set").value;
    const wanted = chosen.search.trim().toLowerCase();
    let rows = shown.rows.filter((row) => (!set || row.set_name === set) && (!wanted || row.prompt.toLowerCase().includes(wanted) || row.response.toLowerCase().includes(wanted)));
    const field = chosen.sort.replace("-", "");
    if (field) {
      const sign = chosen.sort.startsWith("-") ? -1 : 1;
      const of = (row) => row[field] ?? (sign > 0 ? Infinity : -Infinity); // unknown ones last
      rows = [...rows].sort((a, b) => (of(a) === of(b) ? 0 : sign * (of(a) < of(b) ? -1 : 1)));
    }
    let items;
    if (view === "steps") {
      const steps = [...new Set(rows.map((row) => row.step))];
      items = steps.map((step) => rows.filter((row) => row.step === step)).map((group, i) => () => (i === 0
        ? card(group, stepBody(group)) : h("article", { class: "card sample" }, stepBody(group))));
    } else if (view === "groups") {
      const kept = new Set(rows.map((row) => row.prompt_id)); // a group is shown whole, also if the search found one of it
      const whole = byPrompt(wanted ? shown.rows.filter((row) => kept.has(row.prompt_id)) : rows);
      const order = [...kept];
      whole.sort((a, b) => order.indexOf(a[0].prompt_id) - order.indexOf(b[0].prompt_id));
      items = whole.map((group) => () => {
        const most = Math.max(...group.map((row) => Math.abs(row.advantage ?? 0)));
        return card(group, h("div", { class: "pair" }, group.map((row) => response(row, most))));
      });
    } else {
      items = rows.map((row) => () => {
        const before = view === "change" ? shown.first.get(identity(row)) : undefined;
        return card([row], h("div", { class: before ? "pair" : "" },
          before ? response({ ...before, change: null }, 0, `before, step ${before.step}`) : null,
          response(row, 0, before ? `after, step ${row.step}` : `sample ${row.sample_id}`)));
      });
    }
    $("rows").replaceChildren(...items.slice(0, shown.limit).map((item) => item()));
    for (const prompt of $("rows").querySelectorAll(".prompt")) prompt.scrollTop = prompt.scrollHeight; // the last turn is what is asked
    $("more-rows").hidden = items.length <= shown.limit;
    $("more-rows").textContent = `Show more (${items.length - shown.limit})`;
    const cut = shown.total > shown.rows.length ? `; the first ${shown.rows.length} of ${shown.total} are here` : "";
    const some = source.isLive ? "" : "; this file holds a few steps, the dashboard all of them";
    $("samples-count").textContent = `${rows.length} of ${shown.rows.length} samples${cut}${some}`;
    loadTokens();
  }

  function stepBody(group) {
    const most = Math.max(...group.map((row) => Math.abs(row.advantage ?? 0)));
    const mean = group.reduce((sum, row) => sum + (row.reward ?? 0), 0) / group.length;
    return [h("div", { class: "meta" }, h("b", {}, `step ${group[0].step}`), group.length > 1 ? `mean reward ${show(mean)}` : null),
      h("div", { class: "pair" }, group.map((row) => response(row, most)))];
  }

  function again(changes) {
    shown.limit = PAGE_ROWS;
    choose(changes);
    loadSamples();
  }

  for (const [id, key] of [["of", "of"], ["kind", "kind"], ["step", "step"], ["view", "view"], ["sort", "sort"], ["prompt", "prompt"], ["set", "set"], ["colour", "colour"]]) {
    $(id).addEventListener("change", (event) => again({ [key]: event.target.value,
      ...(key === "kind" ? { step: "", view: "" } : {}), ...(key === "of" ? { step: "" } : {}) }));
  }
  $("search").addEventListener("input", (event) => { shown.limit = PAGE_ROWS; choose({ search: event.target.value }); drawSamples(); });
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    $(id).addEventListener("click", () => again({ step: String(shown.steps[shown.steps.indexOf(shown.step) + by] ?? shown.step) }));
  }
  $("more-rows").addEventListener("click", () => { shown.limit += PAGE_ROWS; drawSamples(); });

  // ---- other controls -----------------------------------------------------------------------------------------

  $("smooth").addEventListener("input", (event) => { choose({ smooth: event.target.value }); drawCharts(); });
  $("x-axis").addEventListener("change", (event) => { choose({ x: event.target.value }); drawCharts(); });
  $("more").addEventListener("change", (event) => {
    if (event.target.value) choose({ more: [...chosen.more, event.target.value] });
    drawCharts();
  });
  $("runs-filter").addEventListener("input", drawRuns);
  for (const link of document.querySelectorAll('a[href^="#"]')) { // the address holds the choices
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const section = $(link.getAttribute("href").slice(1));
      section.scrollIntoView();
      section.focus({ preventScroll: true });
    });
  }
  addEventListener("hashchange", () => { readAddress(); refresh(); });

  // ---- following the runs -------------------------------------------------------------------------------------

  async function refresh() {
    runs = await source.runs();
    const known = new Set(runs.map((run) => run.name));
    const kept = chosen.run.filter((name) => known.has(name));
    if (kept.length < chosen.run.length || kept.length === 0) {
      choose({ run: kept.length ? kept : runs.slice(0, source.isLive ? 1 : 100).map((run) => run.name) });
    }
    let isChanged = overviews.size !== chosen.run.length;
    for (const name of overviews.keys()) {
      if (!chosen.run.includes(name)) { overviews.delete(name); isChanged = true; }
    }
    const failed = [];
    await Promise.all(chosen.run.map(async (name) => {
      try {
        const answer = await source.overview(name, overviews.get(name)?.stamp);
        if (answer && answer !== overviews.get(name)) { overviews.set(name, answer); isChanged = true; }
      } catch (error) {
        if (error.status === undefined) throw error; // no server
        failed.push(`${name}: ${error.message}`);
      }
    }));
    drawRuns();
    $("empty").hidden = runs.length > 0 && failed.length === 0;
    $("empty").textContent = failed.join("\n") || "No run is here yet. One appears as soon as it writes its first files.";
    $("content").hidden = overviews.size === 0;
    if (overviews.size && isChanged) {
      drawWords();
      drawCharts();
      await Promise.all([loadSamples(), drawComparison()]);
    }
  }

  async function drawComparison() {
    const several = chosen.run.length > 1;
    $("compare").hidden = $("to-compare").hidden = !several;
    if (!several) return;
    const { tables } = await source.tables(chosen.run);
    $("comparison").replaceChildren(...tables.map((one, i) => (one.rows.length ? table(one, i === tables.length - 1 ? 1 : Infinity)
      : h("p", { class: "soft" }, `${one.title}: none`))));
  }

  async function follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL_MS));
      if (document.hidden) continue;
      try {
        await refresh();
        $("live").textContent = "live";
      } catch (error) {
        $("live").textContent = `the dashboard does not answer (${error.message})`;
      }
      $("live").classList.toggle("lost", $("live").textContent !== "live");
    }
  }

  async function loadPlotly() {
    const packed = $("plotly");
    if (!packed) return;
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    document.head.append(Object.assign(document.createElement("script"), { textContent: await new Response(stream).text() }));
    packed.remove();
  }

  async function start() {
    readAddress();
    setTheme(remembered());
    if (innerWidth <= 900) $("runs-fold").open = false;
    $("smooth").value = chosen.smooth || 0.6;
    $("x-axis").value = chosen.x;
    await loadPlotly();
    await refresh();
    document.body.dataset.ready = "true";
    if (source.isLive) { $("live").textContent = "live"; follow(); }
  }

  start().catch((error) => {
    $("empty").hidden = false;
    $("empty").textContent = `This page could not be shown: ${error.message}`;
    if (source.isLive) follow();
  });
})();
