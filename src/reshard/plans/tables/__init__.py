"""Tables of plans and jobs as text. Start at `plan_table` and `job_table`, which `print` shows."""
