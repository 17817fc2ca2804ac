"""The site: the pages of docs/, examples that they link to, a page of worked changes.

pages       copies the pages, and makes pages of the files beside docs/ that they link to
worked      two shardings chosen from a table, and what the change between them takes
docstrings  doctests and literal blocks of docstrings, as the generator shows them
links       what is built links to what is there, and takes nothing from elsewhere

    docs/ --pages, worked--> build/site-source/ --zensical--> build/site/ --links--> checked
"""
