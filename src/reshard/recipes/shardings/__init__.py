"""Shardings that follow from a recipe: over the axes of a mesh, of layers, of fused parameters.

axis_mapping        a recipe's axes are some of the mesh's
numbering           where the N-th layer or expert lives
adapters            low-rank adapters (LoRA), cut as the weights that they change
fused_sharding      the sharding of a fused parameter, from those of its members
"""
