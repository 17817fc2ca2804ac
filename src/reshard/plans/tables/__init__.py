"""Tables of layouts, plans and jobs as text.

Start at `plan_table` and `job_table`, which `print` shows; `layout_table` lists what each rank
holds. What moves is listed by `movement_table`, and `busiest` names the ranks of most load.
"""
