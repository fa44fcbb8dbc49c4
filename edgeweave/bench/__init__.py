"""What `edgeweave bench` and `edgeweave demo` are made of: graphs, harness, cases, tables, charts.

Start at `harness` (how a case is checked and timed), then `cases_mm` and `cases_scatter` (what is
compared with what), `targets` (what has to be reached) and `passes` (one run over a suite).
"""
