"""Side-by-side measurements, stated as ratios."""
