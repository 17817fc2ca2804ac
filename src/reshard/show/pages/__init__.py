"""HTML pages: each is one file without scripts, which fetches nothing.

html_report  the report of a plan, and the parts that other pages take from it; start here

heat_map, host_flows and memory_chart are its charts, rank_legend and style what all pages share.
"""
