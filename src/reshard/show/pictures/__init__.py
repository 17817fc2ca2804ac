"""Pictures of layouts and of what moves between them.

text_picture  `picture` and `change_picture`, in box-drawing characters; start here
svg_picture   the same in colour, for pages
mesh_picture  what each device holds, drawn as the devices lie in the mesh

Both kinds draw what `regions` finds. `drawing` gives it sizes in characters, `scale` on a page;
`labels`, `origins` and `notes` say who holds what, where it comes from and what is not drawn.
"""
