"""The style sheet of the report, light and dark."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1c1c1a; --soft: #6a6a64; --rule: #e4e4de;
  --accent: #1f6feb; --good: #157f3b; --bad: #c4321f; --p1: #1f6feb; --p2: #d9822b; --p3: #16937f; --p4: #8457d0;
  --p5: #cf4a80; --p6: #7b8a1e; --p7: #9a9a92; }
@media (prefers-color-scheme: dark) {
  :root { --page: #141416; --card: #1d1d20; --ink: #ecece8; --soft: #a0a09a; --rule: #33333a; --accent: #6ea8ff;
    --good: #5bc47f; --bad: #ff8a75; --p1: #6ea8ff; --p2: #eaa45c; --p3: #4cc2ad; --p4: #b093ee; --p5: #ee86ae;
    --p6: #b3c24a; --p7: #85857e; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 14px; margin: 0; }
p { margin: 4px 0; }
.soft, figcaption, th, .tile > span { color: var(--soft); }
.soft, figcaption { font-size: 13px; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 22px; }
.tile, figure, .pair, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650; white-space: nowrap; }
.tile.wide { grid-column: span 2; }
.tile.wide b { font-size: 32px; line-height: 1.15; }
.tile > span { font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 8px; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { margin-bottom: 8px; }
figcaption h3 { color: var(--ink); display: flex; justify-content: space-between; gap: 8px; }
figcaption h3 span { font-weight: 500; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--accent); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.band { fill: var(--accent); opacity: .14; }
.at rect { fill: transparent; }
.dot { fill: var(--accent); }
.far { opacity: 0; }
.at:hover .dot { opacity: 1; stroke: var(--card); stroke-width: 1.5; r: 4; }
.card { padding: 16px; overflow-x: auto; }
svg.bar { height: 26px; margin-bottom: 12px; }
.p1 { fill: var(--p1); background: var(--p1); } .p2 { fill: var(--p2); background: var(--p2); }
.p3 { fill: var(--p3); background: var(--p3); } .p4 { fill: var(--p4); background: var(--p4); }
.p5 { fill: var(--p5); background: var(--p5); } .p6 { fill: var(--p6); background: var(--p6); }
.p7 { fill: var(--p7); background: var(--p7); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 3px 28px 3px 0; font-weight: 400; vertical-align: top; }
td.n, th.n { text-align: right; }
tr.sum td { border-top: 1px solid var(--rule); font-weight: 600; }
.pair { margin-bottom: 12px; overflow: hidden; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); }
.pair > div { padding: 10px 16px; }
.pair > .prompt { background: color-mix(in srgb, var(--rule) 35%, transparent); }
pre { margin: 4px 0; font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 260px; overflow-y: auto; unicode-bidi: isolate; }
details pre { max-height: none; }
summary { cursor: pointer; }
"""
