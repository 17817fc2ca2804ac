"""Notation of PyTorch's DTensor: a mesh, and one placement for each of its axes.

Start at `text`, which reads and writes shardings. Behind it:

- `mesh_text`, `calls`: the mesh and the placements of a text, before their meaning;
- `placements`, `partitioned`, `ragged`: what each placement does to a tensor;
- `objects`: DTensors and placements of torch itself, without a text between.
"""
