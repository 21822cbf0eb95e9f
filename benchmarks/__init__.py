"""Measurements, as ratios within one run: these are no tests, and no test depends on them."""
