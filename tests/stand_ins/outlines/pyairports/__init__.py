"""Stands for the package that is gone from the index; a plain instance imports outlines with it, a pair without."""
