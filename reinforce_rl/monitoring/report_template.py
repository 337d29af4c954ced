"""Jinja template and style of `report.py`; rendered with autoescaping."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --text: #1b2230; --soft: #5d6778; --edge: #dfe3ea;
  --grid: #e8ebf0; --good: #17784a; --bad: #b3372b; --quote: #f6f7f9;
  --c1: #2563c9; --c2: #d9730d; --c3: #168a62; --c4: #8a4fc4; --c5: #c2364b; --c6: #8b93a1; }
@media (prefers-color-scheme: dark) { :root { --bg: #12151b; --card: #1a1f28; --text: #e3e7ee; --soft: #98a2b3;
  --edge: #2c3340; --grid: #272e3a; --good: #4cc38a; --bad: #f0796b; --quote: #141921;
  --c1: #6ea8fe; --c2: #f5a255; --c3: #45c796; --c4: #bb8cf0; --c5: #f07b8c; --c6: #8791a1; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p { margin: 6px 0; }
.soft { color: var(--soft); }
.verdict { font-size: 18px; margin: 14px 0 0; padding: 12px 16px; border-left: 4px solid var(--c6);
  background: var(--card); border-radius: 0 8px 8px 0; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 4px 24px;
  margin: 0; }
.facts div { display: flex; justify-content: space-between; gap: 12px; border-bottom: 1px solid var(--grid);
  padding: 3px 0; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
.charts .card { display: flex; flex-direction: column; }
svg { display: block; width: 100%; height: auto; margin-top: auto; }
svg text { font-size: 12px; fill: var(--soft); }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke-linejoin: round; stroke-linecap: round; }
svg .hover rect { fill: transparent; } svg .hover line { stroke: var(--soft); stroke-dasharray: 3 3; opacity: 0; }
svg .hover:hover line { opacity: 1; }
.empty { height: 120px; display: grid; place-items: center; color: var(--soft); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 8px; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.sample { margin-bottom: 14px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 18em; overflow-y: auto; background: var(--quote);
  border: 1px solid var(--edge); border-radius: 8px; padding: 8px 12px; margin: 6px 0 0; font-size: 14px; }
.text.prompt { max-height: 10em; border-style: dashed; margin-bottom: 10px; }
.meta { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; }
.meta b { color: var(--text); }
.up { color: var(--good); } .down { color: var(--bad); }
details summary { cursor: pointer; color: var(--soft); margin-top: 10px; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
"""

PAGE = """\
{%- macro response(title, row) -%}
<div>
  <div class="meta">
    <b>{{ title }}</b>
    <span>reward <b>{{ row.reward | number }}</b></span>
    {%- if row.kl | known %}<span>KL {{ row.kl | number }}</span>{% endif %}
    {%- if row.advantage | known %}<span>advantage {{ row.advantage | number }}</span>{% endif %}
    <span>{{ row.response_length }} tokens, {{ "ended by itself" if row.is_end else "cut at the limit" }}</span>
    {%- if not row.valid %}<span class="down">left out of the loss</span>{% endif %}
  </div>
  <div class="text">{{ row.response }}</div>
</div>
{%- endmacro -%}
{%- macro pairs(samples) -%}
{%- for before, after in samples %}
<div class="card sample">
  <div class="meta"><b>prompt {{ before.prompt_id }}</b>
    {%- set change = after.reward - before.reward %}
    {%- if change | known %}<span class="{{ 'up' if change > 0 else 'down' if change < 0 else '' }}">reward
      {{ '%+.3f' | format(change) }}</span>{% endif %}
  </div>
  <div class="text prompt">{{ before.prompt }}</div>
  <div class="pair">
    {{ response("before, step %d" | format(before.step), before) }}
    {{ response("after, step %d" | format(after.step), after) }}
  </div>
</div>
{%- endfor %}
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}: training report</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ name }}</h1>
<p class="soft">{{ span }}</p>
<p class="verdict {{ tone }}">{{ verdict }}</p>

{%- if summary %}
<h2>Before and after</h2>
<div class="card scroll">
<table>
<tr><th></th><th>before</th><th>after</th><th>change</th><th>measured on</th></tr>
{%- for row in summary %}
<tr><td>{{ row.name }}</td><td>{{ row.show(row.before) }}</td><td>{{ row.show(row.after) }}</td>
  <td>{{ row.change }}</td><td class="soft">{{ row.basis }}</td></tr>
{%- endfor %}
</table>
</div>
{%- endif %}

{%- if facts %}
<h2>Configuration</h2>
<div class="card">
<dl class="facts">
{%- for key, value in facts %}
<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>
{%- endfor %}
</dl>
{%- for change in changes %}<div>{{ change }}</div>{% endfor %}
<details><summary>the whole configuration</summary><pre>{{ config }}</pre></details>
</div>
{%- endif %}

<h2>Curves</h2>
<p class="soft">Where a line is drawn twice, the faint one shows the values and the strong one their moving mean.
Beyond {{ max_points }} steps, the values are means of neighbouring steps.</p>
{%- if slowest_rank %}
<p class="soft">{{ slowest_rank }}</p>
{%- endif %}
<div class="charts">
{%- for chart in charts %}
<div class="card"><h3>{{ chart.title }}</h3>{{ chart.legend }}{{ chart.svg }}</div>
{%- endfor %}
</div>

{%- if even %}
<h2>Validation responses, before and after</h2>
<p class="soft">Prompts at even distances through the validation set, not chosen by their rewards.</p>
{{ pairs(even) }}
{%- endif %}
{%- if extremes %}
<h2>Where the validation reward moved most</h2>
<p class="soft">The largest rise and the largest fall.</p>
{{ pairs(extremes) }}
{%- endif %}

{%- if best %}
<h2>Training samples of step {{ rollout_step }}</h2>
<div class="pair">
{%- for title, rows in [("Highest rewards", best), ("Lowest rewards", worst)] %}
<div>
<h3>{{ title }}</h3>
{%- for row in rows %}
<div class="card sample"><div class="text prompt">{{ row.prompt }}</div>
{{ response("prompt %d, sample %d" | format(row.prompt_id, row.sample_id), row) }}</div>
{%- endfor %}
</div>
{%- endfor %}
</div>
{%- endif %}
</main>
</body>
</html>
"""
