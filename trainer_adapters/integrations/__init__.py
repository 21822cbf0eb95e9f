"""Adapters for other projects, one file each, and `options`, which they share. A file may import its project, so import the
one that you need by its name."""
