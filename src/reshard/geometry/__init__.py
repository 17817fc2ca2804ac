"""The geometry of a change of layouts: what moves, in elements, for one shape and two layouts.

Start at `layout_change`: `LayoutChange(source, target)` is the core that plans, jobs, collectives
and checkpoints share. It knows no dtype, runner, cost or picture. Behind it:

- who holds what: `replicas`, `holders`, `contributions`, `part_runs`;
- what meets what: `overlap` of a dimension, `key_intersections` and `box_intersections` where
  cells form no grid;
- what moves: `routes`, written out as boxes by `transfers` and joined by `coalescing`;
- what is chosen among: `demand` (for `reshard.plans.senders`), `overlap_matrix` (for relabelling);
- what is proved: `lower_bound`, `verification`.
"""
