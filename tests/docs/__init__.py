"""The site that ``make docs`` makes, and the programs on its pages."""
